"""`anyprec run MODEL IMAGES...`: what a model file says of images, at each width; or its accuracy over a test set.

Images are read by images.py, accuracy is measured by accuracy.py, the engine does the work. Called by anyprec.cli.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anyprec.choices import LAYOUTS
from anyprec.cli.output import print_json
from anyprec.cli.plot_file import check_picture
from anyprec.cli.tables import bits_name, table
from anyprec.data import load_data
from anyprec.errors import AnyprecError, InputError, UnsupportedBits
from anyprec.files import written_whole
from anyprec.progress import Progress
from anyprec.run import segmentation
from anyprec.run.accuracy import AccuracyRow, measure
from anyprec.run.images import (
    ImageBatch,
    count_images,
    find_files,
    is_array,
    missing_preprocessing,
    read_batches,
    unknown_size,
)
from anyprec.run.labels import labeled, number
from anyprec.run.model import PackedModel, is_random, load
from anyprec.widths import parse_widths

MANY = 100  # images from which on a progress bar is worth its line

EXAMPLE = "anyprec run digits.apm photo.png --bits 1,2,4,8"

Outputs = dict[str, list[tuple[npt.NDArray[np.float32], ...]]]  # profile -> batch -> outputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL.apm", help="a model file (.apm) of `anyprec pack`, or a name of `anyprec models`"
    )
    parser.add_argument(
        "images", nargs="*", metavar="IMAGE", help=".npy arrays, image files (JPEG, PNG, ...), or folders of them"
    )
    parser.add_argument(
        "--bits",
        metavar="BITS",
        help="such as 4, 1-8,32, all, a mixed profile, or random: drawn for each image (default: the widest; a test "
        "set: all)",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads per call (default: 1)")
    parser.add_argument(
        "--size", type=int, metavar="N", help="height and width of the images, if the network takes any size"
    )
    parser.add_argument("--max-bits", type=int, metavar="K", help="read only the first K bits of the file")
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare every tensor with its checksum (default: yes)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    images = parser.add_argument_group("for images")
    images.add_argument("--layout", choices=LAYOUTS, help="layout of .npy arrays (default: detected from the channels)")
    images.add_argument("--top", type=int, metavar="N", help="classes to show (default: 3)")
    images.add_argument(
        "--out",
        metavar="FILE",
        help="also write the outputs: .npy; or, for the segmentation of one picture, its mask: .png",
    )
    images.add_argument("--masks", metavar="DIR", help="for segmentation: also write colored masks and overlays")
    tests = parser.add_argument_group("for a test set")
    tests.add_argument("--dataset", metavar="NAME", help="accuracy over this data set's test images, such as digits")
    tests.add_argument("--data", metavar="DIR", help="folder that holds the data set (the embedded digits need none)")
    tests.add_argument("--limit", type=int, metavar="N", help="use this many images (default: all)")
    tests.add_argument("--batch", type=int, metavar="N", help="images per call (default: 1)")
    tests.add_argument("--picture", metavar="FILE.png", help="also draw accuracy and latency against bits")


def run(args: argparse.Namespace) -> int:
    check_options(args)
    model = load(args.model, max_bits=args.max_bits, threads=args.threads, verify=args.verify)
    if not model.profiles:
        raise UnsupportedBits(f"--max-bits {args.max_bits} leaves nothing of {args.model} to run; give more")
    if args.dataset is not None:
        return run_test_set(args, model)
    return run_images(args, model)


def at_least_one(number: int, option: str) -> int:
    if number < 1:
        raise AnyprecError(f"{option} {number} is too few; give 1 or more")
    return number


def check_options(args: argparse.Namespace) -> None:
    """An option that would have no effect is a mistake."""
    if args.dataset is not None and args.images:
        raise AnyprecError(f"got both images ({args.images[0]}) and --dataset {args.dataset}; give one of them")
    if args.dataset is None and not args.images:
        raise AnyprecError("no images; give .npy arrays, image files or folders, or --dataset NAME for the accuracy")
    odd = ("layout", "top", "out", "masks") if args.dataset is not None else ("data", "limit", "batch", "picture")
    for name in odd:
        if getattr(args, name) is not None:
            needs = "images, not with --dataset" if args.dataset is not None else "--dataset NAME, not with images"
            raise AnyprecError(f"--{name} goes with {needs}; leave it out")


def chosen_profiles(model: PackedModel, text: str | None, default: Sequence[str]) -> list[str]:
    """'1-4,fast' -> ['1', '2', '3', '4', 'fast'], each one of the model's."""
    if text is None:
        return list(default)
    if text.strip() == "all":
        return list(model.profiles)
    if is_random(text.strip()):  # random:2,4,8 has commas of its own
        model.drawn_among(text.strip())
        return [text.strip()]
    names: list[str] = []
    for part in (p.strip() for p in text.split(",")):
        is_widths = re.fullmatch(r"-?[0-9]+(-[0-9]+)?|float|fp32", part, re.IGNORECASE)
        names += map(str, parse_widths(part)) if is_widths else [part]
    for name in names:
        model.accuracy(
            int(name) if name.isdigit() else name
        )  # refuses what the file does not have, and says what it has
    return list(dict.fromkeys(names))


# --- Images ---


def run_images(args: argparse.Namespace, model: PackedModel) -> int:
    profiles = chosen_profiles(model, args.bits, [model.profile])
    top = at_least_one(3 if args.top is None else args.top, "--top")
    if args.out:
        check_out(args.out)
    if args.masks:
        segmentation.check_folder(args.masks)
    files = find_files(args.images)
    as_mask = bool(args.out) and Path(args.out).suffix == ".png"
    if as_mask and (sum(map(count_images, files)) != 1 or len(profiles) != 1):
        raise AnyprecError(f"--out {args.out} takes one picture at one width; for more of them give --masks DIR")
    total = sum(map(count_images, files)) * len(profiles)
    records: list[dict[str, Any]] = []
    outputs: Outputs = {profile: [] for profile in profiles}
    with Progress("run", total=total, unit="img") if total >= MANY else contextlib.nullcontext() as bar:
        for path in files:
            for batch in read_batches(path, model, args.layout, args.size):
                answers: dict[str, list[Any]] = {}
                drawn: dict[str, list[Any]] = {}
                for profile in profiles:
                    if is_random(profile):
                        y, drawn[profile] = run_each(model, batch, profile, path)
                    else:
                        y = run_batch(model, batch, profile, path)
                    answers[profile] = [answer(model, image, top, batch.layout) for image in y[0]]
                    if args.masks:
                        write_masks(args.masks, model, batch, y[0], profile)
                    if as_mask:
                        ((_, _, mask, palette),) = masks_of("--out FILE.png", model, batch, y[0])
                        segmentation.save_mask(args.out, mask, palette)
                    elif args.out:  # else maps of many images would fill the memory for nothing
                        outputs[profile].append(y)
                    if bar:
                        bar.update(len(batch.names))
                for i, name in enumerate(batch.names):
                    record = {"image": name, "bits": {profile: answers[profile][i] for profile in profiles}}
                    if drawn:
                        record["drawn"] = {profile: widths[i] for profile, widths in drawn.items()}
                    records.append(record)
    if args.out and not as_mask:
        save(outputs, args.out)
    if not all(map(is_array, files)):
        warn(missing_preprocessing(model, args.size))
    if args.json:
        print_json({"model": model.name, "isa": model.isa, "images": records})
    else:
        print(images_table(records))
    return 0


def run_batch(model: PackedModel, batch: ImageBatch, profile: str, path: Path) -> tuple[npt.NDArray[np.float32], ...]:
    try:
        y = model(batch.images, profile, layout=batch.layout)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    first = y[0] if isinstance(y, tuple) else y
    if batch.any_size and first.ndim == 2:
        raise InputError(f"{path}: {unknown_size(model)}")
    return y if isinstance(y, tuple) else (y,)


def warn(line: str | None) -> None:
    if line is not None:
        print(f"anyprec: warning: {line}", file=sys.stderr)


def run_each(
    model: PackedModel, batch: ImageBatch, profile: str, path: Path
) -> tuple[tuple[npt.NDArray[np.float32], ...], list[Any]]:
    """Image by image, each with a width of its own: the outputs, and the widths that were drawn."""
    outputs, drawn = [], []
    for i in range(len(batch.names)):
        outputs.append(run_batch(model, replace(batch, images=batch.images[i : i + 1]), profile, path))
        drawn.append(model.last_bits)
    return tuple(np.concatenate(parts) for parts in zip(*outputs, strict=True)), drawn


def answer(model: PackedModel, y: npt.NDArray[np.float32], top: int, layout: str) -> Any:
    """The `top` classes of one image, most likely first; of a map, its range, and where it has a score for each of the
    file's labels, the `top` classes with most pixels.
    """
    if y.ndim == 1:
        return labeled(y, model.labels, top, layout)
    found: dict[str, Any] = {"shape": list(y.shape), "least": number(y.min()), "most": number(y.max())}
    if model.labels and y.shape[0 if layout == "NCHW" else 2] == len(model.labels):
        found["classes"] = labeled(y, model.labels, top, layout)
    return found


def write_masks(folder: str, model: PackedModel, batch: ImageBatch, y: npt.NDArray[np.float32], profile: str) -> None:
    """street.8bit.png and street.8bit.overlay.png for image street.jpg; x_3.8bit.png for x.npy[3]."""
    bits = f"{profile}bit" if profile.isdigit() else profile
    for name, image, mask, palette in masks_of("--masks", model, batch, y):
        stem = re.sub(r"\.\w+$|\]", "", name).replace(".npy[", "_")
        segmentation.save_masks(folder, f"{stem}.{bits}", image, mask, palette)


def masks_of(
    option: str, model: PackedModel, batch: ImageBatch, y: npt.NDArray[np.float32]
) -> list[tuple[str, npt.NDArray[np.uint8], npt.NDArray[np.intp], npt.NDArray[np.uint8]]]:
    """Of each image its name, its pixels, the class of each pixel, and the colors of the classes."""
    if y.ndim != 4 or batch.images.dtype != np.uint8:
        why = f"{model.name} gives one answer an image" if y.ndim != 4 else "arrays of floats are no pictures"
        raise AnyprecError(f"{option} is for a segmentation of image files or uint8 arrays, but {why}; leave it out")
    images, maps = (a.transpose(0, 2, 3, 1) if batch.layout == "NCHW" else a for a in (batch.images, y))
    if maps.shape[1:3] != images.shape[1:3] or not 2 <= maps.shape[3] <= 255:
        raise AnyprecError(
            f"{option}: {model.name} gives maps of {maps.shape[1:]}, no class for every pixel; leave it out"
        )
    palette = segmentation.colors(model.labels, maps.shape[3])
    return [
        (name, image, np.argmax(scores, axis=2), palette)
        for name, image, scores in zip(batch.names, images, maps, strict=True)
    ]


def images_table(records: Sequence[dict[str, Any]]) -> str:
    rows: list[list[str]] = []
    for record in records:
        for profile, found in record["bits"].items():
            if isinstance(found, dict):  # a map, such as a segmentation's: --out keeps it
                size = " x ".join(map(str, found["shape"]))
                cells = [f"{size}, from {shown(found['least'])} to {shown(found['most'])}"]
                if "classes" in found:
                    cells = [f"{one['label']}  {100 * one['share']:.1f} %" for one in found["classes"]]
            else:
                cells = [
                    f"{one['class'] if one['label'] is None else one['label']}  {likelihood(one)}" for one in found
                ]
            drawn = record.get("drawn", {}).get(profile)
            rows.append([record["image"], bits_name(profile) if drawn is None else f"{profile}: {drawn}", *cells])
    width = max(map(len, rows))
    heads = ["image", "bits", "best", "then"][:width]
    return table([[*row, *[""] * (width - len(row))] for row in (heads, *rows)])


def likelihood(one: dict[str, Any]) -> str:
    """97.1 %; the score itself where there is only one."""
    return shown(one["score"]) if one["probability"] is None else f"{100 * one['probability']:.1f} %"


def shown(value: float | None) -> str:
    return "nan" if value is None else f"{value:.3f}"


def check_out(path: str) -> None:
    """Before the work, not after it."""
    if Path(path).suffix not in (".npy", ".png") or not Path(path).absolute().parent.is_dir():
        raise AnyprecError(f"--out {path}: give a file .npy, or .png for a mask, in a folder that is there")


def save(outputs: Outputs, path: str) -> None:
    """y.npy; y.4bit.npy for each of several profiles; y.1.npy for the second output of the network."""
    stem = Path(path).with_suffix("")
    for profile, parts in outputs.items():
        bits = f".{profile}bit" if profile.isdigit() else f".{profile}"
        for output in range(len(parts[0])):
            name = f"{stem}{bits if len(outputs) > 1 else ''}{f'.{output}' if output else ''}.npy"
            arrays = [np.asarray(y[output]) for y in parts]
            if len({array.shape[1:] for array in arrays}) > 1:
                raise InputError(
                    f"--out {path}: images of different sizes give outputs of different sizes; run them one by one"
                )
            with written_whole(name) as file:
                np.save(file, np.concatenate(arrays))


# --- A test set ---


def run_test_set(args: argparse.Namespace, model: PackedModel) -> int:
    profiles = chosen_profiles(model, args.bits, model.profiles)
    batch = at_least_one(1 if args.batch is None else args.batch, "--batch")
    if args.picture:
        check_picture(args.picture)
    data = load_data(args.dataset, "test", args.data, limit=args.limit)
    rows = measure(model, data, profiles, batch=batch, size=args.size, progress=True)
    if model.takes_uint8 and model.preprocessing is None and data.task == "classification":
        warn(f"{model.name} does not say how its training prepared images; they are prepared as {data.name} usually is")
    about = {
        "model": Path(args.model).stem,
        "dataset": data.name,
        "images": len(data),
        "batch": batch,
        "threads": model.threads,
        "isa": model.isa,
    }
    if args.json:
        print_json({**about, "results": {row.profile: row_record(row, data.classes) for row in rows}})
    else:
        print(accuracy_table(about, rows))
    if args.picture:
        from anyprec.run.accuracy_plot import draw

        draw(rows, heading(about), args.picture)
        if not args.json:
            print(f"drawn in {args.picture}")
    return 0


def heading(about: dict[str, Any]) -> str:
    tested = f"{about['model']}: {about['images']} test images of {about['dataset']}"
    return f"{tested}; batch {about['batch']}, {about['threads']} thread{'s' * (about['threads'] > 1)}, {about['isa']}"


def row_record(row: AccuracyRow, classes: Sequence[str]) -> dict[str, Any]:
    record = {"accuracy": row.accuracy, "latency_ms": row.latency_ms, "bytes": row.bytes}
    if row.miou is None:
        return record
    ious = {name: None if np.isnan(iou) else iou for name, iou in zip(classes, row.ious, strict=True)}
    return {**record, "miou": row.miou, "iou": ious}


def accuracy_table(about: dict[str, Any], rows: Sequence[AccuracyRow]) -> str:
    masks = bool(rows) and rows[0].miou is not None
    cells = [["bits", *(["mIoU", "pixels right"] if masks else ["accuracy"]), "ms an image", "bytes"]]
    for row in rows:
        miou = [] if row.miou is None else [f"{row.miou:.2f} %"]
        figures = [*miou, f"{row.accuracy:.2f} %", f"{row.latency_ms:.4f}", f"{row.bytes:,}"]
        cells.append([bits_name(row.profile), *figures])
    return heading(about) + "\n" + table(cells, right=tuple(range(1, len(cells[0]))))
