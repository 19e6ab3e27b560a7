"""Verdicts follow the numbers, both ways; tables 1 and 5 are made from what the trainings found."""

import numpy as np
import pytest

from anyprec.analysis.attack import Attack, Robustness
from anyprec.analysis.distributions import histogram
from anyprec.report.record import Claim, load, save
from anyprec.reproduce import figures, paper, robustness, table1, table2, table3, table4, table5, table6, uca
from anyprec.reproduce.catalog import EXPERIMENTS, conclude
from anyprec.reproduce.experiment import Context, joint_claim, per_width
from anyprec.reproduce.scales import default_net
from anyprec.widths import DEFAULT_WIDTHS
from anyprec.zoo import build

OF = dict(zip(DEFAULT_WIDTHS, (50.0, 60.0, 65.0, 66.0, 67.0), strict=True))


def shifted(by):
    return {bits: value + by for bits, value in OF.items()}


def test_within_a_point():
    assert table1.within("a net", OF, shifted(1.0)).holds
    assert not table1.within("a net", OF, {**OF, 4: OF[4] + 1.01}).holds
    assert not table1.within("a net", {1: 50.0}, {1: 50.0}).holds  # a width is missing
    assert "4 bit -2.00" in table1.within("a net", OF, {**OF, 4: OF[4] + 2}).numbers


def test_the_papers_own_numbers_under_our_claims():
    """What the paper says of its tables comes out as true of its numbers."""
    dedicated, ours = (dict(zip(DEFAULT_WIDTHS, row, strict=True)) for row in paper.TABLE1["CIFAR-10 ResNet-20"])
    assert table1.within("", ours, dedicated).holds
    found = {widths: dict(zip(range(1, 9), row, strict=True)) for widths, row in paper.TABLE4.items()}
    assert [claim.holds for claim in table4.claims(found)] == [True, True, True]
    modes = {m: dict(zip(DEFAULT_WIDTHS, r, strict=True)) for m, r in paper.TABLE5["CIFAR-10 ResNet-20"].items()}
    assert table5.distillation_claim("", "recursive", modes).holds
    for name, row in paper.TABLE3.items():
        numbers = dict(zip(DEFAULT_WIDTHS, row, strict=True))
        if name == "any-precision":
            assert table3.no_collapse_claim(numbers, 0.1).holds and not table3.collapses(name, numbers, 0.1).holds
        else:
            assert table3.collapses(name, numbers, 0.1).holds and not table3.no_collapse_claim(numbers, 0.1).holds
    square = {a: {b: paper.UCA[min(a, b)][max(a, b)] for b in DEFAULT_WIDTHS} for a in DEFAULT_WIDTHS}
    in_range, neighbors = uca.claims(square)
    assert in_range.holds and neighbors.holds
    assert "2 with 4 (0.955)" in neighbors.numbers  # as with float: a tie goes to the neighbor
    square[8][1] = square[1][8] = 0.99
    assert not uca.claims(square)[1].holds and "8 with 1 (0.990)" in uca.claims(square)[1].numbers


def test_the_papers_matrix_under_our_claims():
    matrix = np.array(list(paper.FGSM.values()))
    attacked = dict(zip(DEFAULT_WIDTHS, paper.FGSM_DEDICATED, strict=True))
    rows = {a: {**dict(zip(DEFAULT_WIDTHS, row, strict=True)), "random": 80.0} for a, row in paper.FGSM.items()}
    found = Robustness(Attack(), 10_000, {}, {**rows, "all": {"random": 70.0}})
    claims = robustness.claims_of("FGSM", matrix, found, attacked)
    assert [claim.holds for claim in claims] == [True, True, True]
    matrix[0, 3] = 10.0
    broken = robustness.claims_of("FGSM", matrix, found, attacked)[0]
    assert not broken.holds and "True of 4 of 5 rows" in broken.numbers and "1 to 8" in broken.numbers


def test_worse_numbers_fail_the_other_claims():
    found = {widths: dict.fromkeys(range(1, 9), 90.0 + len(widths)) for widths in paper.TABLE4}
    found[1, 2, 4, 8][1] = 10.0
    assert [claim.holds for claim in table4.claims(found)] == [False, False, False]
    modes = {"hard": OF, "recursive": {**shifted(1), 2: OF[2]}}
    assert not table5.distillation_claim("", "recursive", modes).holds


@pytest.mark.slow
def test_sizes_by_the_papers_accounting():
    dedicated, ours = table2.accounting(build("resnet50", num_classes=1000))
    then = paper.TABLE2["dedicated"][1:-1]
    assert [round(v, 1) for v in dedicated.values()] == pytest.approx(then, abs=0.11)
    assert ours[-1] == pytest.approx(paper.TABLE2["any-precision"][-1], abs=0.2)
    assert table2.same_accounting(dedicated, ours).holds
    assert not table2.same_accounting({k: v + 1 for k, v in dedicated.items()}, ours).holds
    assert table2.half_size_claim("", 49.0, 100.0).holds and not table2.half_size_claim("", 51.0, 100.0).holds


def test_distances_of_distributions():
    random = np.random.default_rng(0)
    values = {k: random.normal(0, 1, 4000) for k in (1, 2, 4, 8)}
    same = histogram(values)
    assert figures.width_distance(same, 1) < 0.1 and figures.width_distance(same, 8) == 0
    assert not figures.toy_claim(same).holds
    moved = histogram({**values, 1: values[1] * 3 + 2, 2: values[2] + 0.5})
    assert figures.width_distance(moved, 1) == pytest.approx(2 + np.log(3), abs=0.1)
    assert figures.toy_claim(moved).holds
    off, put_right = figures.layer_claims({"conv1": {"before": moved, "after": same}})
    assert off.holds and put_right.holds
    assert not figures.layer_claims({"conv1": {"before": same, "after": moved}})[1].holds
    assert not figures.shift_claim("net", {"a": {8: True, 4: True}, "b": {8: True, 4: False}}).holds


def test_segmentation_claims():
    net = default_net("tiny")
    ours = {bits: {"miou": value, "accuracy": value} for bits, value in OF.items()}
    native = {bits: ours[bits] for bits in (1, 2, 4, 8)}
    worse = {bits: {"miou": value - 0.5, "accuracy": value} for bits, value in OF.items()}
    assert [c.holds for c in table6.claims_of(net, ours, worse, native, 5.0)] == [True, True, True, True]
    other = {**native, 2: {"miou": 59.0, "accuracy": 0.0}}
    low = {**ours, 8: {"miou": 60.0, "accuracy": 0.0}}
    assert [c.holds for c in table6.claims_of(net, low, ours, other, 40.0)] == [False, False, False, False]


class FakeStore:
    """Every training is done: accuracies by width, a point less for dedicated models, `better` with each seed."""

    data_root = device = None

    def __init__(self, better=0.0):
        self.better = better

    def at_seed(self, seed):
        return FakeStore(self.better * seed)

    def seconds(self, training):
        return 0.0

    def test(self, training):
        by = self.better if len(training.recipe.widths) > 1 else -1.0
        return {bits: {"accuracy": OF[bits] + by} for bits in training.recipe.widths}


@pytest.mark.thorough
def test_over_seeds(tmp_path):
    """Means and deviations; a claim holds if it does with every seed."""
    conclude("table1", "tiny", tmp_path, FakeStore(-3.0), lambda share, what: None, seeds=2)
    result = load(tmp_path / "table1")
    rows = {row.labels: row for row in result.tables[0].rows if row.of == "ours"}
    ours = rows["ResNet-8 on digits", "any-precision"].values
    assert ours == pytest.approx([value - 1.5 for value in OF.values()])
    spread = rows["ResNet-8 on digits", "any-precision, deviation"].values
    assert spread == pytest.approx([3 / 2**0.5] * 5)
    assert rows["ResNet-8 on digits", "dedicated, deviation"].values == (0.0,) * 5
    claim = result.claims[0]
    assert not claim.holds and claim.numbers.startswith("With 1 of 2 seeds. Seed 0 (holds): ")
    assert "Seed 1 (does not hold): " in claim.numbers and "1 bit -2.00" in claim.numbers
    assert result.key == EXPERIMENTS["table1"].key("tiny", 2) and "--seeds 2" in result.command
    paper_rows = [row for row in result.tables[0].rows if row.of == "paper"]
    assert len(paper_rows) == 2 * len(paper.TABLE1)
    assert {t["name"] for t in result.trainings} >= {default_net("tiny").joint("seed=1").name}


def test_a_claim_that_could_not_be_tested_once_is_not_tested():
    claims = [Claim("It is so.", holds, "n") for holds in (True, None)]
    assert joint_claim(claims).holds is None and joint_claim(claims[:1]).holds


def test_ours_beside_the_authors():
    found = {"hard": OF, "wider+label": shifted(0.5), "recursive": shifted(0.55)}
    assert table5.best_claim("", "wider+label", found).holds and not table5.best_claim("", "hard", found).holds


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["table1", "table5", "authors"])
def test_tables_of_finished_trainings(name, tmp_path):
    context = Context("tiny", FakeStore(), tmp_path)
    experiment = EXPERIMENTS[name]
    result = experiment.run(context).result(experiment, "tiny")
    save(result, tmp_path)
    assert load(tmp_path) == result
    table = result.tables[0]
    numbers = {row.labels: row.values for row in table.rows if row.of == "ours" and row.values}
    notes = [row.note for row in table.rows if not row.values]
    assert (notes or name == "authors") and all("not run at this scale" in note for note in notes)
    if name == "table1":
        assert numbers["ResNet-8 on digits", "dedicated"] == (49.0, 59.0, 64.0, 65.0, 66.0)
        assert all(claim.holds for claim in result.claims) and len(result.claims) == 4
    elif name == "table5":
        assert numbers["ResNet-8 on digits", "hard", "labels (no distillation)"] == tuple(OF.values())
        assert len(numbers) == 6
        *helps, best = result.claims
        assert len(helps) == 4 and not any(claim.holds for claim in helps)  # all modes alike: none helps
        assert best.holds
    else:
        assert numbers["authors", "dorefa, mean, recursive"] == tuple(OF.values()) and result.claims[0].holds
    for picture in result.pictures:
        assert (tmp_path / f"{picture.name}.png").stat().st_size > 5_000
        assert (tmp_path / f"{picture.name}.csv").exists()


def test_words_for_widths():
    assert per_width({32: 1.0, 1: -2.5}, sign=True) == "1 bit -2.50, float +1.00"
