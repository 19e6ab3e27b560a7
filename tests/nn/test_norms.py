"""Switched norms: tables that leave each other alone, checkpoints with other tables, shared statistics.

Run as a script, this file is one process of the two that share their batch statistics.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from anyprec.errors import ProfileError, UncalibratedBits, UnsupportedBits
from anyprec.nn.norms import (
    BatchNorm1d,
    BatchNorm2d,
    SwitchBatchNorm1d,
    SwitchBatchNorm2d,
    SwitchGroupNorm,
    SwitchLayerNorm,
    sync_norms,
)

WIDTHS = (1, 2, 8, 32)

# (switched norm, plain norm, shape of the input)
KINDS = {
    "batch1d": (lambda w: SwitchBatchNorm1d(6, w), lambda: nn.BatchNorm1d(6), (5, 6)),
    "batch1d-long": (
        lambda w: SwitchBatchNorm1d(6, w, eps=1e-3),
        lambda: nn.BatchNorm1d(6, eps=1e-3),
        (5, 6, 7),
    ),
    "batch2d": (lambda w: SwitchBatchNorm2d(6, w), lambda: nn.BatchNorm2d(6), (5, 6, 3, 3)),
    "layer": (lambda w: SwitchLayerNorm((6, 3), w), lambda: nn.LayerNorm((6, 3)), (5, 6, 3)),
    "group": (lambda w: SwitchGroupNorm(2, 6, w), lambda: nn.GroupNorm(2, 6), (5, 6, 3)),
}
every_kind = pytest.mark.parametrize("kind", sorted(KINDS))


def batch(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (1 + seed) + seed


def snapshot(norm: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in norm.state_dict().items()}


@every_kind
def test_each_table_is_a_plain_norm_of_its_own(kind):
    make, plain, shape = KINDS[kind]
    norm = make(WIDTHS)
    plains = {str(k): plain() for k in WIDTHS}
    for seed in range(3):
        for i, key in enumerate(plains):
            norm.key = key
            x = batch(shape, seed + i)
            assert torch.equal(norm(x), plains[key](x))
    for key, other in plains.items():
        assert all(torch.equal(norm.tables[key].state_dict()[n], v) for n, v in other.state_dict().items())


@every_kind
def test_training_one_width_leaves_the_others_alone(kind):
    make, _, shape = KINDS[kind]
    norm = make(WIDTHS)
    before = snapshot(norm)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    norm.key = "2"
    norm(batch(shape, 3)).square().mul(torch.arange(shape[-1])).sum().backward()
    optimizer.step()
    changed = {name.split(".")[1] for name, value in norm.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"2"}
    assert all(p.grad is None for key in ("1", "8", "32") for p in norm.tables[key].parameters())


def test_the_widest_is_on_at_first():
    assert SwitchBatchNorm2d(4, (8, 32, 1)).key == "32"


@pytest.mark.parametrize("widths", [(), (0,), (9,), (1, 1), 4])
def test_bad_widths(widths):
    with pytest.raises(UnsupportedBits):
        SwitchBatchNorm2d(4, widths)


@every_kind
def test_add_table_copies_and_then_goes_its_own_way(kind):
    make, _, shape = KINDS[kind]
    norm = make(WIDTHS)
    norm.key = "8"
    norm(batch(shape, 2))
    with torch.no_grad():
        norm.tables["8"].weight.fill_(3)
    before = snapshot(norm.tables["8"])
    added = norm.add_table("5", like="8")
    assert added is norm.tables["5"]
    assert all(torch.equal(value, before[name]) for name, value in added.state_dict().items())
    norm.key = "5"
    norm(batch(shape, 9))
    with torch.no_grad():
        added.weight.fill_(7)
    assert all(torch.equal(value, before[name]) for name, value in norm.tables["8"].state_dict().items())
    norm.add_table("5", like="1")  # replaces
    assert torch.equal(norm.tables["5"].weight, norm.tables["1"].weight)


def test_a_table_that_is_not_there():
    norm = SwitchBatchNorm2d(4, WIDTHS)
    with pytest.raises(UncalibratedBits) as caught:
        norm.table("3")
    assert str(caught.value) == (
        "bits=3 has no norm tables (there are 1, 2, 8, 32); calibrate it first: "
        "anyprec.calibrate(model, loader, widths=(3,))"
    )
    norm.key = "mixed"
    with pytest.raises(UncalibratedBits, match=r"profile 'mixed' has no norm tables .*profiles=\(profile,\)"):
        norm(torch.rand(2, 4, 3, 3))


@pytest.mark.parametrize("name", ["half", "float", "keys", "train"])
def test_profile_names_that_torch_keeps_for_itself(name):
    norm = SwitchBatchNorm2d(4, WIDTHS)
    with pytest.raises(ProfileError, match=f"profile name '{name}' .* choose another, such as {name}_1"):
        norm.add_table(name, like="8")


# --- Checkpoints --------------------------------------------------------------------------------------------


def model(widths: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), SwitchBatchNorm1d(6, widths), nn.Linear(6, 6), SwitchLayerNorm(6, widths))


def test_a_checkpoint_with_more_tables_than_the_model():
    saved = model(WIDTHS)
    for norm in (saved[1], saved[3]):
        norm.add_table("5", like="8")
        norm.add_table("mixed", like="2")
        with torch.no_grad():
            norm.tables["5"].weight.fill_(3)
    fresh = model(WIDTHS).double()
    fresh.load_state_dict(saved.state_dict())
    for key in ("5", "mixed"):
        saved[1].key = saved[3].key = fresh[1].key = fresh[3].key = key
        x = batch((5, 4))
        assert torch.allclose(fresh(x.double()).float(), saved(x), atol=1e-5)
    assert fresh[1].tables["5"].weight.dtype == torch.float64
    assert snapshot(fresh).keys() == snapshot(saved).keys()


def test_a_checkpoint_with_fewer_tables_than_the_model():
    """An error that names them, unless the caller asked for what there is."""
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"1\.tables\.2\.weight".*"3\.tables\.8\.bias"'):
        model(WIDTHS).load_state_dict(model((1, 32)).state_dict())
    loose = model(WIDTHS)
    missing = loose.load_state_dict(model((1, 32)).state_dict(), strict=False).missing_keys
    assert "1.tables.2.weight" in missing and "1.tables.1.weight" not in missing


def test_norms_without_parameters_load():
    norm = SwitchLayerNorm(6, WIDTHS, elementwise_affine=False)
    norm.load_state_dict(norm.state_dict())


def test_deepcopy_is_independent():
    norm = SwitchBatchNorm1d(6, WIDTHS)
    norm.follows = "conv"
    twin = copy.deepcopy(norm)
    twin.key = "1"
    twin(batch((5, 6)))
    assert norm.key == "32" and twin.follows == "conv"
    assert torch.equal(norm.tables["1"].running_mean, torch.zeros(6))


# --- Statistics across processes ----------------------------------------------------------------------------

SHARES = (3, 5)  # images of the two processes: not the same, as in a last batch


def test_alone_sync_changes_nothing():
    norm, plain, x = BatchNorm2d(3), nn.BatchNorm2d(3), batch((4, 3, 5, 5), 1)
    sync_norms(nn.Sequential(norm))
    assert norm.sync
    assert torch.equal(norm(x), plain(x))
    sync_norms(nn.Sequential(norm), on=False)
    assert not norm.sync


def cases() -> list[tuple[nn.Module, Tensor]]:
    """(norm, the whole batch) pairs, the same in every process."""
    n = sum(SHARES)
    made = [
        (BatchNorm2d(3), batch((n, 3, 4, 4), 1).double()),
        (BatchNorm1d(3, momentum=None), batch((n, 3), 2).double()),
        (BatchNorm1d(3, affine=False), batch((n, 3, 5), 1).double()),
        (BatchNorm1d(3, track_running_stats=False), batch((n, 3), 1).double()),
    ]
    for norm, _ in made:
        norm.double()
        if norm.affine:
            nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(7))
    half = (BatchNorm2d(3), (batch((n, 3, 40, 40), 1) + 30).bfloat16())
    return [*made, half]


def run(norm: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Two steps; outputs, gradients and statistics of the last."""
    for _ in range(2):
        norm.zero_grad()
        x = x.detach().requires_grad_()
        y = norm(x)
        (y.double() ** 3).sum().backward()
    result = {"y": y.detach(), "x.grad": x.grad}
    result |= {f"{name}.grad": p.grad for name, p in norm.named_parameters()}
    return result | norm.state_dict()


@pytest.mark.slow
def test_two_processes_see_one_batch(tmp_path):
    address = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", __file__]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=os.environ | address, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=100)
            assert process.returncode == 0, errors.decode()
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for i, (norm, x) in enumerate(cases()):
        expected = run(norm, x)
        parts = [found[rank][i] for rank in range(2)]
        for key, value in expected.items():
            if key in ("y", "x.grad"):
                both = torch.cat([part[key] for part in parts])
                assert both.dtype == value.dtype
            elif key.endswith(".grad"):
                both = parts[0][key] + parts[1][key]  # of the sum of the two losses
            else:
                both = parts[0][key]
                assert torch.equal(both, parts[1][key])  # statistics are the same everywhere
            share = 1e-12 if x.dtype == torch.float64 else 0.01
            assert (both.double() - value.double()).norm() <= share * value.double().norm(), (i, key)


def one_process(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    results = []
    for norm, x in cases():
        sync_norms(norm)
        results.append(run(norm, x.split(SHARES)[rank]))
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    one_process(int(sys.argv[1]), Path(sys.argv[2]))
