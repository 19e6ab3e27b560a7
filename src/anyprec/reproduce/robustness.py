"""Appendix A.2: images made against one width (FGSM, PGD), shown to every width, and to one drawn at random."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from anyprec.analysis.attack import ALL, RANDOM, Attack, Robustness, attack_dedicated, attack_matrix
from anyprec.data import MaskData
from anyprec.report.record import Claim, Picture, Row, Table
from anyprec.reproduce import paper
from anyprec.reproduce.experiment import BITS, Context, Experiment, Finding, paper_row, per_width, values_of
from anyprec.reproduce.plots import heat
from anyprec.reproduce.scales import default_net
from anyprec.reproduce.store import Training, width_name
from anyprec.training.run import eval_augment
from anyprec.widths import DEFAULT_WIDTHS

ATTACKS = {
    "fgsm": Attack("fgsm", epsilon=paper.FGSM_STEP),
    "pgd": Attack("pgd", epsilon=paper.FGSM_STEP),
}
NAMES = {"fgsm": "FGSM", "pgd": "PGD, 10 steps"}


def trainings(scale: str) -> list[Training]:
    net = default_net(scale)
    return [net.joint(), *net.all_dedicated().values()]


def run(context: Context) -> Finding:
    net = context.net
    joint, alone = net.joint(), net.all_dedicated()
    model = context.model(joint)
    how = eval_augment(joint.recipe.augment)
    tables, pictures, claims = [], [], []
    for i, (kind, attack) in enumerate(ATTACKS.items()):
        # One step on every test image, many steps on some.
        data = context.test_data(joint, None if kind == "fgsm" else context.images)
        assert not isinstance(data, MaskData)
        context.tell(i / 2, f"{NAMES[kind]}, any-precision")
        found = attack_matrix(
            model, data, DEFAULT_WIDTHS, attack, attack_all=True, augment=how, device=context.device
        )  # fmt: skip
        context.tell(i / 2 + 0.4, f"{NAMES[kind]}, dedicated")
        models = {bits: context.model(training) for bits, training in alone.items()}
        dedicated = attack_dedicated(models, data, attack, augment=how, device=context.device)
        attacked = {bits: values["attacked"] for bits, values in dedicated.items()}
        tables.append(table_of(kind, found, attacked, {bits: v["clean"] for bits, v in dedicated.items()}))
        matrix = matrix_array(found)
        picture = Picture(
            f"{kind}-matrix", f"{NAMES[kind]}: accuracy under attack",
            "Rows: the width that was attacked. Columns: the width that answers. Framed: the least of each row.",
        )  # fmt: skip
        drawn = heat(
            context.folder, picture, BITS, matrix, x_label="answering", y_label="attacked", mark_least=True
        )  # fmt: skip
        pictures.append(drawn)
        claims += claims_of(NAMES[kind], matrix, found, attacked)
    scaled = [net.scaled] if net.scaled else []
    if context.images:
        scaled.append(f"PGD on {context.images:,} test images.")
    notes = [
        f"Epsilon is {paper.FGSM_STEP} of the network's input, after mean and deviation. The row 'all' is an "
        f"attacker who "
        "knows that widths are switched, and attacks all at once; the column 'random' draws a width for every image."
    ]
    return Finding(tables, claims, pictures, scaled, notes)


def table_of(kind: str, found: Robustness, attacked: Mapping[int, float], clean: Mapping[int, float]) -> Table:
    columns: list[int | str] = [*DEFAULT_WIDTHS, RANDOM]
    rows = [Row(("any-precision", "nothing"), tuple(found.clean[c] for c in columns))]
    rows += [
        Row(("any-precision", name if name == ALL else width_name(int(name))), tuple(row[c] for c in columns))
        for name, row in found.matrix.items()
    ]
    rows.append(Row(("dedicated", "nothing"), (*values_of(clean), None)))
    rows.append(Row(("dedicated", "its own width"), (*values_of(attacked), None)))
    if kind == "fgsm":
        rows += [paper_row(("any-precision", width_name(a)), (*row, None)) for a, row in paper.FGSM.items()]
        rows.append(paper_row(("dedicated", "its own width"), (*paper.FGSM_DEDICATED, None)))
    title = f"Test accuracy under {NAMES[kind]}, {found.images:,} images"
    return Table(kind, title, ("model", "attacked"), (*BITS, RANDOM), tuple(rows))


def matrix_array(found: Robustness) -> np.ndarray:
    return np.array([[found.matrix[a][d] for d in DEFAULT_WIDTHS] for a in DEFAULT_WIDTHS])


def claims_of(kind: str, matrix: np.ndarray, found: Robustness, attacked: Mapping[int, float]) -> list[Claim]:
    lowest = {width_name(bits): BITS[int(matrix[i].argmin())] for i, bits in enumerate(DEFAULT_WIDTHS)}
    rows_hold = [row.min() >= row[i] for i, row in enumerate(matrix)]
    own = {bits: float(matrix[i, i]) for i, bits in enumerate(DEFAULT_WIDTHS)}
    better = {bits: own[bits] - attacked[bits] for bits in own}
    gain = {bits: float(found.matrix[bits][RANDOM]) - own[bits] for bits in own}
    return [
        Claim(
            f"{kind}: the diagonal of the matrix is its minimum in each row.",
            all(rows_hold),
            f"True of {sum(rows_hold)} of {len(rows_hold)} rows; the lowest of each row, attacked to answering: "
            + ", ".join(f"{a} to {d}" for a, d in lowest.items())
            + ".",
        ),
        Claim(
            f"{kind}: at the width that is attacked, the any-precision model is no worse than a dedicated one.",
            all(gap >= 0 for gap in better.values()),
            f"Above it by, in points: {per_width(better, sign=True)}.",
        ),
        Claim(
            f"{kind}: drawing a width for every image is a better defense than staying at the width attacked.",
            all(gap > 0 for gap in gain.values()),
            f"Gained, in points: {per_width(gain, sign=True)}; against an attack on all widths at once random widths "
            f"give {found.matrix[ALL][RANDOM]:.2f} %.",
        ),
    ]


EXPERIMENT = Experiment(
    "robustness",
    "Appendix A.2: robustness to adversarial attacks",
    "Images made by FGSM against one width fool that width most; answering at another width gains up to 12 points, "
    "and at the attacked width the model is as good as a dedicated one, or better.",
    trainings,
    run,
    {"paper": 3600, "medium": 900, "small": 780, "tiny": 10},
)
