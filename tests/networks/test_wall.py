"""Public networks pack and agree with torch, or are refused in one line: a sample by default, all in `make slow`.

`make networks` installs the packages they come from; where one is missing, its networks are skipped.
"""

import pytest
from catalog import Network, networks
from wall import WIDTHS, try_network

NETWORKS = networks()
SAMPLE = {  # about 40 s together
    "timm/resnet10t", "timm/tinynet_e", "timm/convnext_atto",
    "transformers/BertForSequenceClassification", "transformers/GPT2LMHeadModel",
    "transformers/GPT2ForSequenceClassification", "transformers/ViTForImageClassification",
}  # fmt: skip


def check(network: Network) -> None:
    if network.missing:
        pytest.skip(f"{network.missing} is not installed: make networks")
    row = try_network(network)
    if network.expected == "packs":
        assert row["state"] == "packs", row
        assert min(row[f"agree {bits}"] for bits in WIDTHS) >= 99 and float(row["difference"]) < 1e-4, row
        assert row["moved"] <= 4 + 2e-3 * row["codes"], row
    else:
        assert row["state"] == "refused" and network.expected in row["why"], row


def test_the_list():
    names = [str(network) for network in NETWORKS]
    assert len(names) == len(set(names)) >= 120
    assert set(names) >= SAMPLE


@pytest.mark.thorough
@pytest.mark.parametrize("network", [n for n in NETWORKS if str(n) in SAMPLE], ids=str)
def test_sample(network):
    check(network)


@pytest.mark.slow
@pytest.mark.parametrize("network", [n for n in NETWORKS if str(n) not in SAMPLE], ids=str)
def test_network(network):
    check(network)
