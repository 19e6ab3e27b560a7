"""`anyprec inspect FILE`: what a model file holds and how many bytes each width needs. Called by anyprec.cli.

It reads the header alone; with --verify every byte that is there.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from anyprec.cli.output import print_json
from anyprec.cli.tables import table
from anyprec.format.model_file import ModelFile
from anyprec.models.catalog import find
from anyprec.preprocessing import Preprocessing
from anyprec.widths import FLOAT

EXAMPLE = "anyprec inspect digits.apm --verify"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="MODEL.apm",
        help="a model file (.apm), complete or still growing, or a name of `anyprec models`",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--verify", action="store_true", help="also compare every tensor with its checksum")
    parser.add_argument("--layers", action="store_true", help="also list every op")


def run(args: argparse.Namespace) -> int:
    with ModelFile(find(args.file)) as file:
        verified = file.verify() if args.verify else None
        found = describe(file, verified)
    if args.json:
        print_json(found)
        return 0
    print("\n\n".join(part for part in (summary(found), profiles(found), parts(found)) if part))
    if args.layers:
        print("\n" + layers(found))
    return 0


def describe(file: ModelFile, verified: int | None = None) -> dict[str, Any]:
    """Everything inspect shows, as plain data: the content of --json."""
    graph, sizes = file.graph_json, file.sizes
    return {
        "file": file.path,
        "format": graph["format"],
        "name": graph["name"],
        "made_by": graph["made_by"],
        "bytes": {"here": file.size, "complete": file.total},
        "input": graph["input"],
        "preprocessing": preprocessing(graph["input"]),
        "labels": graph["labels"],
        "outputs": {name: list(file.checked.values[name]) for name in graph["outputs"]},
        **{kind: count(graph["weights"], kind) for kind in ("quantized", "fixed", "float")},
        "widths": {str(bits): file.bytes_for(bits) for bits in all_widths(file)},
        "profiles": [
            {
                "name": profile.name,
                "weights": profile.weights,
                "acts": profile.acts,
                "accuracy": profile.accuracy,
                "bytes": file.bytes_for_profile(profile),
                "available": file.bytes_for_profile(profile) <= file.size,
            }
            for profile in file.profiles
        ],
        "sizes": {
            "header": sizes.header,
            "tables": sizes.tables,
            "floats": sizes.floats,
            "codes": sizes.codes,
            "planes": list(sizes.planes),
            "tails": sizes.tails,
            "total": sizes.total,
            "ratio": round(sizes.ratio, 4),
        },
        "ops": [op_row(file, op) for op in graph["ops"]],
        "verified": verified,
    }


def preprocessing(record: dict[str, Any]) -> dict[str, Any] | None:
    """How pictures become inputs, with mean and deviation; None where the file does not say."""
    how = record.get("preprocessing")
    if how is None:
        return None
    image, size = record["image"], record.get("size")
    made = Preprocessing.from_image(
        image["scale"],
        image["shift"],
        size=size,
        resize=how["resize"],
        to=how["to"],
        filter=how["filter"] or "bilinear",
    )
    return made.to_dict()


def all_widths(file: ModelFile) -> list[int]:
    return [*file.planes, *([FLOAT] if any(name.startswith("tail.") for name in file.tensors) else [])]


def kind_of(weight: dict[str, Any]) -> str:
    return "float" if weight["float"] else "fixed" if "bits" in weight else "quantized"


def count(weights: dict[str, Any], kind: str) -> dict[str, int]:
    shapes = [weight["shape"] for weight in weights.values() if kind_of(weight) == kind]
    return {"layers": len(shapes), "weights": sum(map(math.prod, shapes))}


def op_row(file: ModelFile, op: dict[str, Any]) -> dict[str, Any]:
    weight = file.graph_json["weights"].get(op.get("weight"))
    row: dict[str, Any] = {
        "name": op["name"],
        "op": op["op"],
        "shape": list(file.checked.values[op["name"]]),
        "codes": op["name"] in file.checked.codes_of,
    }
    if weight is not None:
        row |= {"weight": op["weight"], "weight_shape": weight["shape"], "weight_kind": kind_of(weight)}
    return row


# --- as text ---


def size_text(sizes: Sequence[int | None]) -> str:
    return " x ".join("?" if size is None else str(size) for size in sizes)


def summary(found: dict[str, Any]) -> str:
    here, complete = found["bytes"]["here"], found["bytes"]["complete"]
    state = "complete" if here == complete else f"{here:,} are here so far"
    kinds = Counter(op["op"] for op in found["ops"])
    image = "float images" + (" or uint8" if found["input"]["image"] else "")
    if "size" in found["input"]:
        image += f"; made for {size_text(found['input']['size'])}"
    inputs = [("input", f"{size_text(found['input']['shape'])}  (H x W x C; {image})")]
    if len(found["input"]["shape"]) != 3 or "input" in kinds:
        given = [("input", found["input"])] + [(op["name"], op) for op in found["ops"] if op["op"] == "input"]
        inputs = [
            ("input", f"{name}: N x {size_text(one['shape'])}" + ("  (whole numbers)" if one.get("integer") else ""))
            for name, one in given
        ]
    pictures = [] if found["preprocessing"] is None else [("pictures", str(Preprocessing(**found["preprocessing"])))]
    rows = [
        ("file", f"{found['file']}  ({complete:,} bytes, {state})"),
        ("network", f"{found['name']}  (format {found['format']}, made by {found['made_by'] or 'unknown'})"),
        *inputs,
        *pictures,
        ("output", ", ".join(f"{name}: {size_text(shape)}" for name, shape in found["outputs"].items())),
        ("ops", f"{len(found['ops'])}: " + ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())),
    ]
    for kind, title in (("quantized", "quantized"), ("fixed", "8 bit"), ("float", "float")):
        if kind != "fixed" or found[kind]["layers"]:
            rows.append((title, f"{found[kind]['weights']:,} weights in {found[kind]['layers']} layers"))
    if found["labels"] is not None:
        rows.append(("labels", f"{len(found['labels'])}: {shortened(found['labels'])}"))
    if found["verified"] is not None:
        rows.append(("checksums", f"{found['verified']} tensors, all as written"))
    return table(rows)


def shortened(labels: Sequence[str], most: int = 72) -> str:
    """The first of them, as many as fit a line."""
    text = ", ".join(labels)
    return text if len(text) <= most else text[:most].rpartition(",")[0] + ", ..."


def profiles(found: dict[str, Any]) -> str:
    total = found["bytes"]["complete"]
    rows = [["profile", "weights", "acts", "accuracy", "bytes needed", "of the file", ""]]
    for profile in found["profiles"]:
        accuracy = "" if profile["accuracy"] is None else f"{profile['accuracy']:.2f} %"
        share = f"{100 * profile['bytes'] / total:.1f} %"
        missing = "" if profile["available"] else "not yet here"
        rows.append(
            [
                profile["name"],
                bits(profile["weights"]),
                bits(profile["acts"]),
                accuracy,
                f"{profile['bytes']:,}",
                share,
                missing,
            ]
        )
    return table(rows, right=(1, 2, 3, 4, 5))


def bits(given: int | dict[str, int]) -> str:
    """4; 'float'; '1-4' for a mixed profile."""
    if isinstance(given, int):
        return "float" if given == FLOAT else str(given)
    values = sorted(set(given.values()))
    return (
        "-".join("float" if one == FLOAT else str(one) for one in dict.fromkeys((values[0], values[-1])))
        if values
        else ""
    )


def parts(found: dict[str, Any]) -> str:
    sizes = found["sizes"]
    rows = [["part", "bytes", "up to here"]]
    upto = 0
    named = [("header", sizes["header"]), ("tables", sizes["tables"]), ("float layers", sizes["floats"])]
    named += [("8 bit layers", sizes["codes"])]
    named += [(f"plane {number:02}", size) for number, size in enumerate(sizes["planes"])]
    for name, size in [*named, ("float tails", sizes["tails"])]:
        upto += size
        if size:
            rows.append([name, f"{size:,}", f"{upto:,}"])
    note = f"{sizes['ratio']:.3f} x its packed weights, float and 8 bit layers and tables"
    return table(rows, right=(1, 2)) + "\n" + note


def layers(found: dict[str, Any]) -> str:
    rows = [["op", "kind", "value", "weight", "weights", ""]]
    for op in found["ops"]:
        shape = op.get("weight_shape")
        kind = {"fixed": "8 bit"}.get(op.get("weight_kind", ""), op.get("weight_kind", ""))
        weight = ["", "", ""] if shape is None else [size_text(shape), f"{math.prod(shape):,}", kind]
        rows.append([op["name"], op["op"], size_text(op["shape"]) + (" codes" if op["codes"] else ""), *weight])
    return table(rows, right=(4,))
