"""Made-up data in the official layouts is read by the readers of the real sets."""

import pytest

from anyprec.data import MaskData, load_data
from anyprec.reproduce import synthetic
from anyprec.reproduce.cost import FACTS


@pytest.mark.thorough
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", sorted(synthetic.MAKERS))
def test_the_readers_take_it(name, tmp_path):
    root = synthetic.make(name, tmp_path / name)
    for split in ("train", "test"):
        data = load_data(name, split, root)
        assert len(data) >= 2
        if isinstance(data, MaskData):
            image, mask = data.pair(0)
            assert image.shape[:2] == mask.shape and data.num_classes == FACTS[name].classes
        else:
            assert data.shape == FACTS[name].shape and len(set(data.labels.tolist())) > 1


def test_voc_takes_sbd_too(tmp_path):
    root = synthetic.make("voc", tmp_path)
    names = [sample.name for sample in load_data("voc", "train", root).samples]
    assert sum(name.startswith("2007") for name in names) == sum(name.startswith("2008") for name in names) == 4


def test_what_is_embedded_needs_none(tmp_path):
    assert synthetic.make("digits", tmp_path / "x") is None and not (tmp_path / "x").exists()
