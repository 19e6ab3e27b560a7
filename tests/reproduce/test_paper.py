"""The paper's numbers, checked against each other where it prints one twice."""

import pytest

from anyprec.reproduce import paper


def test_every_row_has_its_columns():
    for rows in (*paper.TABLE1.values(), *paper.TABLE6.values()):
        assert [len(row) for row in rows] == [5, 5]
    assert all(len(row) == 5 for row in (*paper.TABLE3.values(), *paper.FGSM.values(), paper.FGSM_DEDICATED))
    assert all(len(row) == 8 for row in paper.TABLE4.values())


def test_sizes_add_up():
    for row in paper.TABLE2.values():
        assert sum(row[:-1]) == pytest.approx(row[-1], abs=0.11)  # of rounded numbers


def test_numbers_that_are_printed_twice():
    for name, modes in paper.TABLE5.items():
        assert modes["recursive"] == paper.TABLE1[name][1]
    assert paper.TABLE3["any-precision"] == paper.TABLE1["ImageNet ResNet-50"][1]
    assert {row[-1] for name, row in paper.TABLE3.items() if name != "any-precision"} == {75.95}
    assert paper.TABLE1["ImageNet ResNet-50"][0][-1] == 75.95


def test_what_the_text_says_of_them():
    assert all(row[i] == min(row) for i, row in enumerate(paper.FGSM.values()))
    assert all(0.9 <= value <= 1 for row in paper.UCA.values() for value in row.values())
    assert paper.TABLE2["any-precision"][-1] < paper.TABLE2["dedicated"][-1] / 2
