"""`anyprec bench`: fair turns, figures from times, tables, and processes that load, answer and fail cleanly."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_rivals import write_packages
from sampling import later
from torch import nn

from anyprec.bench import race as bench_module
from anyprec.bench import rivals
from anyprec.bench.contestant import memory_bytes, turn
from anyprec.bench.race import BenchResult, BenchSettings, RaceRow, RivalFailure, bench
from anyprec.bench.timing import Contestant, ContestantFailed, percentiles, prepare_rivals, race, times_faster
from anyprec.cli import main
from anyprec.cli.bench import counts, rival_names, table
from anyprec.errors import AnyprecError, UnsupportedBits
from anyprec.format.file import write
from anyprec.format.graph import INPUT, Graph, GraphProfile, Op, Weight
from anyprec.format.model_file import ModelFile
from anyprec.nn.convert import convert
from anyprec.packing.packing import pack
from anyprec.run.oracle import run_graph


def tiny_graph(size=6):
    """quantize -> conv at 1, 2 and 8 bits, and a mixed profile."""
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 256, (5, 3, 3, 4)).astype(np.uint8)
    ops = (
        Op("q", "quantize", (INPUT,), {"signed": False, "rectify": True, "affine": True}),
        Op("c", "conv", ("q",), {"weight": "w", "kernel": [3, 3], "stride": [1, 1], "pad": [1, 1, 1, 1],
                                 "dilation": [1, 1], "groups": 1, "signed": False, "affine": True}),
    )  # fmt: skip
    mixed = GraphProfile("fast", {"w": 2}, {"q": 2})
    profiles = (GraphProfile("1", 1, 1, 50.0), GraphProfile("2", 2, 2, 60.0), GraphProfile("8", 8, 8, 70.0), mixed)
    weight = Weight((5, 3, 3, 4), codes={k: wide >> (8 - k) for k in (1, 2, 8)})
    planes = {k: tuple(range(k)) for k in (1, 2, 8)}
    tables = {"q": np.zeros((4, 2, 4), np.float32), "c": np.ones((4, 2, 5), np.float32)}
    for row, bits in enumerate((1, 2, 8, 2)):
        tables["q"][row, 0] = (2**bits - 1) / 4  # codes spread over their range for normal numbers
    return Graph("tiny", (size, size, 4), profiles, planes, {"w": weight}, ops, ("c",), tables)


@pytest.fixture
def model(tmp_path):
    write(tiny_graph(), tmp_path / "tiny.apm")
    return str(tmp_path / "tiny.apm")


# --- Turns and figures ---


class Fake:
    """A contestant that takes what it is told, and writes down when it was asked."""

    resident, peak = 1000, 2000
    kernels, cold_s = None, 0.25

    def __init__(self, name, seconds, log):
        self.name, self.seconds, self.log = name, seconds, log

    def turn(self):
        self.log.append(self.name)
        return [self.seconds, self.seconds * 3, self.seconds]

    def close(self):
        self.log.append(f"{self.name} closed")


def test_everyone_has_a_turn_in_every_round():
    log, rounds = [], []
    times = race({n: Fake(n, s, log) for n, s in (("a", 1), ("b", 2))}, 3, lambda: rounds.append(len(log)))
    assert log == ["a", "b"] * 3
    assert rounds == [2, 4, 6]
    assert times == {"a": [[1, 3, 1]] * 3, "b": [[2, 6, 2]] * 3}


def test_percentiles_are_over_all_runs():
    assert percentiles([[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]) == (2, 6, 10)


def test_ratios_are_taken_round_by_round():
    """The machine halves its speed in the last two rounds: ratios stay."""
    ours, theirs = [[1], [1], [1], [2], [2]], [[3], [3], [3], [6], [6]]
    assert times_faster(ours, theirs) == 3
    assert times_faster(ours, [[2], [2], [9], [4], [4]]) == 2  # one odd round does not count


def test_a_turn_starts_with_an_untimed_run():
    calls = []
    assert len(turn(lambda: calls.append(0), 4)) == 4
    assert len(calls) == 5


def test_memory_is_measured():
    found = memory_bytes()
    if sys.platform == "linux":
        assert 1e6 < found["resident"] <= found["peak"]


# --- bench() with fake contestants ---


@pytest.fixture
def fakes(monkeypatch):
    """Every contestant is fake: 8 bit and each rival take as many ms as SECONDS says. The log has their orders."""
    seconds = {"onnxruntime fp32": 0.04, "onnxruntime int8": 0.010, "openvino fp32": 0.03, "openvino int8": 0.012}
    log, orders = [], []

    def start(order, environment, timeout_s):
        name = f"{order['engine']} {order.get('variant', order.get('bits'))}"
        if name in broken:
            raise ContestantFailed("out of luck")
        orders.append((dict(order), dict(environment)))
        return Fake(name, seconds.get(name, 0.004), log)

    broken = set()
    monkeypatch.setattr(Contestant, "start", start)
    monkeypatch.setattr(bench_module, "prepare_rivals", lambda *args: {})
    monkeypatch.setattr(rivals, "missing", lambda name: ["torch"] if name == "torch" else [])
    monkeypatch.setattr(rivals, "disk_bytes", lambda folder, rival, variant: 123)
    return type("Fakes", (), {"log": log, "orders": orders, "broken": broken})


def row_of(done, engine, variant, **where):
    (row,) = [
        row
        for row in done.rows
        if (row.engine, row.variant) == (engine, variant) and all(getattr(row, k) == v for k, v in where.items())
    ]
    return row


def test_rows(model, fakes):
    done = bench(BenchSettings(model, batches=(1, 8), threads=(1, 2), rounds=2))
    assert len(done.rows) == 2 * 2 * (3 + 4)
    assert done.size == (6, 6)
    row = row_of(done, "anyprec", "2", batch=8, threads=2)
    assert (row.p50_ms, row.images_per_s, row.accuracy) == (4, 2000, 60)
    assert (row.resident_bytes, row.peak_bytes, row.cold_ms) == (1000, 2000, 250)
    with ModelFile(model) as file:
        assert row.disk_bytes == file.bytes_for(2) < file.bytes_for(8)
    assert row.speedup == pytest.approx(2.5)  # against ONNX Runtime, the better int8 of the two
    assert row_of(done, "openvino", "int8", batch=1, threads=1).speedup == pytest.approx(10 / 12)
    assert done.notes == ["no PyTorch: torch not installed; pip install 'anyprec[bench]'"]
    assert all(entry.endswith("closed") for entry in fakes.log[-7:])


def test_each_width_loads_only_its_planes(model, fakes):
    bench(BenchSettings(model, profiles=("1", "8", "fast"), rivals=(), rounds=1))
    assert [(o["bits"], o["max_bits"]) for o, _ in fakes.orders] == [(1, 1), (8, 8), ("fast", 2)]


@pytest.mark.parametrize("isa, onednn", [("avx2", "AVX2"), ("avx512vnni", "AVX512_CORE_VNNI")])
def test_held_to_an_instruction_set(isa, onednn, model, fakes):
    done = bench(BenchSettings(model, profiles=("8",), rounds=1, isa=isa, threads=(2,)))
    switches = {order["engine"]: environment for order, environment in fakes.orders}
    assert switches["anyprec"] == {"OMP_NUM_THREADS": "2", "ANYPREC_ISA": isa}
    assert switches["openvino"]["ONEDNN_MAX_CPU_ISA"] == onednn
    assert not row_of(done, "onnxruntime", "int8").limited
    assert row_of(done, "anyprec", "8").speedup == pytest.approx(3)  # OpenVINO's 12 ms: ONNX Runtime is no measure
    assert f"* cannot be held to {isa}" in table(done)


def test_a_rival_that_fails_is_noted_and_the_race_goes_on(model, fakes):
    fakes.broken.add("openvino int8")
    done = bench(BenchSettings(model, rounds=1))
    assert done.failures == [RivalFailure("openvino", "int8", 1, 1, "out of luck")]
    assert row_of(done, "openvino", "fp32").p50_ms == 30
    assert done.best_int8(1, 1) == "ONNX Runtime int8, best int8 of those that ran; OpenVINO int8 out of luck"


def test_without_rivals_there_is_no_ratio(model, fakes):
    done = bench(BenchSettings(model, rivals=(), rounds=1))
    assert {row.speedup for row in done.rows} == {None}
    assert done.notes == []


def test_processes_end_when_ours_fails(model, fakes):
    fakes.broken.add("anyprec 8")
    with pytest.raises(ContestantFailed, match="anyprec 8 bit out of luck"):
        bench(BenchSettings(model, rounds=1))
    assert fakes.log == ["anyprec 1 closed", "anyprec 2 closed"]


def test_wishes_that_do_not_fit(model, fakes, tmp_path):
    with pytest.raises(UnsupportedBits, match="has no profile '4'; choose from 1, 2, 8, fast"):
        bench(BenchSettings(model, profiles=("4",)))
    with pytest.raises(AnyprecError, match=r"--size 9 does not fit .* which takes images of 6 x 6"):
        bench(BenchSettings(model, size=9))
    with pytest.raises(AnyprecError, match="no such file"):
        bench(BenchSettings(model, onnx="missing.onnx"))
    free = str(tmp_path / "free.apm")
    write(replace(tiny_graph(), input_shape=(None, None, 4)), free)
    with pytest.raises(AnyprecError, match="images of any size; say which with --size"):
        bench(BenchSettings(free))
    assert bench(BenchSettings(free, size=9, rounds=1)).size == (9, 9)
    write(replace(tiny_graph(), input_shape=(None, None, 4), image_size=(7, 8)), free)
    assert bench(BenchSettings(free, rounds=1)).size == (7, 8)


# --- The command ---


def test_counts():
    assert counts("1, 8,1", "--batch") == (1, 8)
    for wrong in ("", "0", "x", "1,,2", "-1", "5000"):
        with pytest.raises(AnyprecError, match="--batch"):
            counts(wrong, "--batch")


def test_rival_names():
    assert rival_names("none") == ()
    assert rival_names("openvino,torch") == ("openvino", "torch")
    with pytest.raises(AnyprecError, match="'tflite' is not known"):
        rival_names("tflite")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds: '0' is not a whole number from 1 to 1000000"),
        (["--threads", "two"], "--threads 'two' is not a list of numbers"),
        (["--bits", "9"], "bits=9 is not a bit-width"),
        (["--picture", "x.txt"], "give a file .png"),
        (["--isa", "sse"], "invalid choice"),
    ],
)
def test_mistakes_are_one_line(model, one_line_error, options, message):
    assert message in one_line_error("bench", model, *options)


def test_no_such_file(capsys):
    assert main(["bench", "missing.apm"]) == 2
    assert "missing.apm" in capsys.readouterr().err


def test_without_any_rival_it_says_what_to_install(model, fakes, monkeypatch, capsys):
    monkeypatch.setattr(rivals, "missing", lambda name: ["onnx"])
    assert main(["bench", model, "--rounds", "1"]) == 0
    assert "anyprec: note: no other engine can run here, only anyprec is timed; pip install" in capsys.readouterr().err
    assert main(["bench", model, "--rounds", "1", "--rivals", "none"]) == 0
    assert "pip install" not in capsys.readouterr().err


def test_json(model, fakes, capsys):
    assert main(["bench", model, "--bits", "1,8", "--rounds", "2", "--json", "--rivals", "openvino"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(row["engine"], row["variant"]) for row in record["rows"]] == [
        ("anyprec", "1"), ("anyprec", "8"), ("openvino", "fp32"), ("openvino", "int8")
    ]  # fmt: skip
    assert record["machine"]["rounds"] == 2
    assert record["machine"]["cpu"] and record["machine"]["versions"]["anyprec"]


def test_table(model, fakes, capsys):
    assert main(["bench", model, "--rounds", "1", "--batch", "1,8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny, 6 x 6; median of 1 rounds")
    assert [line.split()[0:2] for line in lines if line.startswith("batch")] == [["batch", "1,"], ["batch", "8,"]]
    (ours,) = (line for line in lines[4:5])
    assert ours.startswith("anyprec 1 bit")
    assert "2.50" in ours and ours.endswith("50.00")
    assert lines.count("x int8 compares with ONNX Runtime int8") == 2
    told = lines[lines.index("kernels used") + 1 : -1]
    assert [line.split("  ")[0] for line in told] == [
        "anyprec", "ONNX Runtime fp32", "ONNX Runtime int8", "OpenVINO fp32", "OpenVINO int8"
    ]  # fmt: skip
    assert all(line.endswith("does not tell") for line in told)
    assert lines[-1].startswith("note: no PyTorch")


def some_bench(accuracy):
    rows = [
        RaceRow("anyprec", name, 1, 1, ms, ms, ms, 1000 / ms, 2.0, 10, 10, 10, accuracy and accuracy + ms)
        for name, ms in (("1", 3.0), ("8", 9.0), ("32", 30.0), ("fast", 4.0))
    ]
    rows += [RaceRow("openvino", v, 1, 1, ms, ms, ms, 1, 1.0, 10, 10, 10) for v, ms in (("int8", 10.0), ("fp32", 28.0))]
    return BenchResult("net", (224, 224), {"isa": "avx2"}, rows)


@pytest.mark.thorough
@pytest.mark.parametrize("accuracy", [None, 60.0])
def test_picture(tmp_path, accuracy):
    pytest.importorskip("matplotlib")
    from anyprec.bench.plot import draw

    draw(some_bench(accuracy), tmp_path / "net.png")
    assert (tmp_path / "net.png").read_bytes().startswith(b"\x89PNG")


# --- Real processes ---

ORDER = {"engine": "anyprec", "batch": 1, "threads": 1, "size": (6, 6), "channels": 4, "max_bits": None, "bits": 2}


def test_a_process_of_its_own(model):
    contestant = Contestant.start({**ORDER, "model": model}, {})
    try:
        times = contestant.turn()
        assert len(times) == contestant.runs >= 1 and min(times) > 0
        assert contestant.cold_s > 0
        if sys.platform == "linux":
            assert 1e6 < contestant.resident <= contestant.peak
    finally:
        contestant.close()
    assert contestant.process.popen.returncode == 0


def test_a_process_that_fails_says_why(tmp_path):
    with pytest.raises(ContestantFailed, match=r"missing\.apm"):
        Contestant.start({**ORDER, "model": str(tmp_path / "missing.apm")}, {})
    with pytest.raises(ContestantFailed, match="No module named 'tflite'"):
        Contestant.start({**ORDER, "engine": "tflite", "variant": "fp32", "folder": str(tmp_path)}, {})


def test_a_process_that_dies_is_no_deadlock(model):
    contestant = Contestant.start({**ORDER, "model": model}, {})
    contestant.process.popen.kill()
    contestant.process.popen.wait()
    with pytest.raises(ContestantFailed, match="died of SIGKILL") as caught:
        contestant.turn()
    assert caught.value.signal == "SIGKILL"
    contestant.close()


SCRIPT = """
import sys, numpy as np
from anyprec.bench import rivals
rival, variant, folder, target = sys.argv[1:]
np.save(target, rivals.open_rival(rival, variant, folder, rivals.random_images(2, 4, (6, 6)), 1).run())
"""


# NNCF and torch take seconds to import.
@pytest.mark.parametrize(
    "rival", [pytest.param(r, marks=[pytest.mark.slow] * (r != "onnxruntime")) for r in rivals.TITLES]
)
def test_rivals_compute_the_twin(model, tmp_path, rival):
    """The whole way: twin, the rival's own int8, a process that runs it; and the numbers it computes."""
    if rivals.missing(rival):
        pytest.skip(f"{rivals.missing(rival)} not installed")
    folder, output = str(tmp_path / "files"), tmp_path / "output.npy"
    prepare_rivals(model, folder, (6, 6), [rival], None)
    x = rivals.random_images(2, 4, (6, 6))
    wanted = run_graph(tiny_graph(), x.transpose(0, 2, 3, 1).copy(), "8")["c"].transpose(0, 3, 1, 2)
    for variant in rivals.VARIANTS[rival]:
        if not rivals.model_file(folder, rival, variant).exists():
            continue  # int8 for OpenVINO needs NNCF or ONNX Runtime
        assert rivals.disk_bytes(folder, rival, variant) > 100
        command = [sys.executable, "-c", SCRIPT, rival, variant, folder, str(output)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        got = np.load(output)
        if variant == "fp32":
            assert np.abs(got - wanted).max() < 0.02 * np.abs(wanted).max()
        else:  # four small images are few to calibrate with: some numbers lie outside the range
            assert np.corrcoef(got.ravel(), wanted.ravel())[0, 1] > 0.98
    contestant = Contestant.start({**ORDER, "engine": rival, "variant": "fp32", "folder": folder, "batch": 2}, {})
    contestant.turn()
    contestant.close()
    assert contestant.process.popen.returncode == 0


def test_files_of_the_rivals_are_kept(model, tmp_path):
    if rivals.missing("torch"):
        pytest.skip("onnx not installed")
    prepare_rivals(model, str(tmp_path), (6, 6), ["torch"], None)
    twin = Path(tmp_path) / "twin.onnx"
    before = twin.stat().st_mtime_ns
    prepare_rivals(model, str(tmp_path), (6, 6), ["torch"], None)
    assert twin.stat().st_mtime_ns == before


# --- Rivals that crash, hang or talk nonsense: real processes, with modules of our own in the rivals' place ---


@pytest.fixture
def fake_rivals(tmp_path, monkeypatch):
    """Packages onnx, onnxruntime, openvino and nncf that do nothing; FATE=kind@place breaks OpenVINO's int8."""
    place = write_packages(tmp_path / "packages", input_shape=(1, 4, 6, 6))
    monkeypatch.setenv("PYTHONPATH", str(place))
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setattr(rivals, "has", lambda package: package != "torch")
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "twin.onnx").write_bytes(b"twin")
    return str(folder)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc as on Linux")
@pytest.mark.parametrize(
    ("fate", "reason", "signal"),
    [
        ("SIGILL@start", "died of SIGILL (the last words of start)", "SIGILL"),
        later(("SIGSEGV@race", "died of SIGSEGV (the last words of race)", "SIGSEGV")),
        later(("SIGILL@file", "died of SIGILL (the last words of file) while its file was made", "SIGILL")),
        ("hang@start", "did not answer within 1 s and was ended", None),
        later(("hang@race", "did not answer within 15 s and was ended", None)),
        later(("exit@start", "ended with code 3 without an answer", None)),
        later(("garbage@start", "gave '\\\\xff no JSON' instead of an answer", None)),
        later(("raise@start", "RuntimeError: could not create a primitive", None)),
        later(("raise@file", "RuntimeError: could not create a primitive while its file was made", None)),
    ],
)
def test_a_rival_that_dies_is_named_with_what_it_died_of(model, fake_rivals, monkeypatch, capsys, fate, reason, signal):
    """In the table, in --json, in the last line, and in the exit code; the best int8 is that of those that ran."""
    monkeypatch.setenv("FATE", fate)
    start = Contestant.start

    def start_impatiently(order, environment, timeout_s):  # with the one that hangs, not with those that are only slow
        if (order["engine"], order.get("variant")) == ("openvino", "int8"):
            timeout_s = {"hang@start": 1.0, "hang@race": 15.0}.get(fate, timeout_s)
        return start(order, environment, timeout_s)

    monkeypatch.setattr(Contestant, "start", start_impatiently)
    done = bench(
        BenchSettings(model, profiles=("8",), rivals=("onnxruntime", "openvino"), rounds=8, folder=fake_rivals)
    )
    assert done.failures == [RivalFailure("openvino", "int8", 1, 1, reason, signal)]
    assert {row.title for row in done.rows} == {
        "anyprec 8 bit", "ONNX Runtime fp32", "ONNX Runtime int8", "OpenVINO fp32"
    }  # fmt: skip
    best = f"ONNX Runtime int8, best int8 of those that ran; OpenVINO int8 {reason}"
    assert row_of(done, "onnxruntime", "int8").speedup == 1
    lines = table(done).splitlines()
    assert f"{'OpenVINO int8':<22} {reason}" in lines
    assert f"x int8 compares with {best}" in lines
    record = done.record()
    assert record["failures"][0]["signal"] == signal and record["failures"][0]["reason"] == reason
    assert record["comparisons"] == [{"batch": 1, "threads": 1, "best_int8": best}]

    monkeypatch.setattr("anyprec.cli.bench.bench", lambda wish, step: done)
    assert main(["bench", model, "--rivals", "onnxruntime,openvino", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["failures"][0]["reason"] == reason
    last = printed.err.splitlines()[-1]
    assert last == (
        f"anyprec: error: the comparison is incomplete: OpenVINO int8 {reason}; leave it out with --rivals onnxruntime"
    )


def test_a_rival_that_is_not_installed_qualifies_the_best_int8(model, fakes, monkeypatch):
    monkeypatch.setattr(rivals, "missing", lambda name: ["openvino"] if name == "openvino" else [])
    done = bench(BenchSettings(model, rounds=1, rivals=("onnxruntime", "openvino")))
    assert done.best_int8(1, 1) == "ONNX Runtime int8, best int8 of those that ran; OpenVINO is not installed"


def test_no_int8_at_all_is_said(model, fakes):
    fakes.broken |= {"openvino int8", "onnxruntime int8"}
    done = bench(BenchSettings(model, rounds=1, rivals=("onnxruntime", "openvino")))
    assert {row.speedup for row in done.rows} == {None}
    assert done.best_int8(1, 1) == "none; ONNX Runtime int8 out of luck; OpenVINO int8 out of luck"


def test_files_that_take_no_images(capsys):
    path = Path(__file__).parents[1] / "format" / "corpus" / "opens-format-3.apm"
    assert main(["bench", str(path), "--rivals", "none"]) == 2
    assert "has several inputs, and bench gives one" in capsys.readouterr().err


# --- Tokens ---


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.a, self.b, self.c = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, words):
        return self.c(self.b(self.a(self.table(words)).relu()).relu().mean(1))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "words.apm"
    example = torch.arange(10).view(2, 5)
    pack(convert(Words().eval(), (1, 8), example=example), path, example=example)
    return str(path)


def test_tokens(words, fakes):
    done = bench(BenchSettings(words, size=7, vocabulary=20, rivals=(), rounds=1))
    assert done.size == (7, 1) and [order["vocabulary"] for order, _ in fakes.orders] == [20, 20]
    with pytest.raises(AnyprecError, match="takes any number of tokens; give that as the size"):
        bench(BenchSettings(words, vocabulary=20))
    drawn = rivals.random_input(2, 1, (7, 1), 20)
    assert drawn.shape == (2, 7) and drawn.dtype == np.int64 and drawn.min() >= 0 and drawn.max() < 20


def test_tokens_in_a_process_of_its_own(words):
    order = {**ORDER, "size": (7, 1), "vocabulary": 20, "bits": 8, "model": words}
    contestant = Contestant.start(order, {})
    try:
        assert min(contestant.turn()) > 0
    finally:
        contestant.close()
