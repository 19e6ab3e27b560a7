"""bench/networks.py: networks of the catalog, shares of scalar steps, rows that the page of networks reads."""

import csv

import networks as bench_networks
import numpy as np
import wall
from catalog import networks as catalog_networks
from chain_builder import Chain

from anyprec.bench.race import BenchResult, RaceRow
from anyprec.format.file import write


def row(engine, variant, p50_ms):
    return RaceRow(engine, variant, 1, 1, p50_ms, p50_ms, p50_ms, 1e3 / p50_ms, None, 1, None, None)


def test_they_are_on_the_wall():
    assert len(bench_networks.NETS) == 12
    assert {net.page for net in bench_networks.NETS.values()} <= {str(n) for n in catalog_networks()}


def test_shares_of_scalar_steps(tmp_path):
    chain = Chain(1, (40, 30, 8), 1)
    out = chain.op("softmax", chain.op("transpose", "input", order=(2, 0, 1)))  # in double precision: scalar
    graph, inputs = chain.finish(out)
    write(graph, tmp_path / "net.apm")
    share = bench_networks.step_shares(tmp_path / "net.apm", inputs["input"].transpose(0, 3, 1, 2), 8, 2)
    assert 0 < share.scalar <= 1 and "softmax (scalar)" in share.most
    result = BenchResult("net", (40, 30), {}, [])
    (line,) = bench_networks.check_scalar({"net": (result, {"8": bench_networks.StepShares(0.2, "softmax")})})
    assert line.startswith("net at 8 bit: 20.0 %")
    assert not bench_networks.check_scalar({"net": (result, {"8": bench_networks.StepShares(0.1, "softmax")})})


def test_rows_are_kept_and_read_by_the_page(tmp_path, monkeypatch):
    path = tmp_path / "networks_speed_cpu_avx2.csv"
    share = {"8": bench_networks.StepShares(0.01, "fma 60 %"), "1": bench_networks.StepShares(0.02, "fma 80 %")}
    for name, ours in (("resnet18", 5.0), ("unet", 8.0)):
        rows = [row("anyprec", "8", ours), row("anyprec", "1", ours / 2), row("onnxruntime", "fp32", 20.0)]
        bench_networks.save(path, {name: (BenchResult(name, (224, 224), {}, rows), share)})
    with path.open(newline="") as file:
        assert [(r["net"], r["scalar_share"]) for r in csv.DictReader(file)][:3] == [
            ("resnet18", "0.01"), ("resnet18", "0.02"), ("resnet18", "")
        ]  # fmt: skip
    monkeypatch.setattr(wall, "RESULTS", tmp_path / "networks.csv")
    speeds = wall.read_speeds()
    assert np.isclose(speeds["timm/resnet18"]["8"], 4) and np.isclose(speeds["paper/UNet"]["1"], 5)
