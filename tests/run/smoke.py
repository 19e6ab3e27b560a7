"""A minute's check of an installed wheel, numpy alone: python tests/run/smoke.py. Called by cibuildwheel.

Random graphs and every kernel on every instruction set of the machine, against the oracle; then the program.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from engine_check import assert_exact, usable_isas
from graph_builder import assert_same
from kernel_graphs import KERNEL_PAIRS, images, pair_graph
from random_graphs import random_graph

import anyprec
from anyprec.run.oracle import run_graph


def main() -> None:
    isas = usable_isas()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(12):
            graph, x = random_graph(seed, special=seed % 3 == 1)
            assert_exact(graph, [x], folder / "net.apm", isas, threads=(1, 2))
        graph = pair_graph(96, 128, ending="codes", pairs=KERNEL_PAIRS)
        (x,) = images((2, 3, 5), c=96)
        assert_exact(graph, [x], folder / "net.apm", isas, threads=(1, 2))

        beside = Path(sys.executable).parent
        program = shutil.which("anyprec-run", path=str(beside)) or shutil.which("anyprec-run")
        assert program, f"anyprec-run is not beside {sys.executable}"
        np.save(folder / "x.npy", x)
        words = [program, "net.apm", "x.npy", "--layout", "NHWC", "--bits", "w2a2", "--out", "y.npy"]
        subprocess.run(words, cwd=folder, check=True)
        assert_same(np.load(folder / "y.npy"), run_graph(graph, x, "w2a2")["back"])
    assert "torch" not in sys.modules
    print(f"anyprec {anyprec.__version__} is exact on {', '.join(isas)}")


if __name__ == "__main__":
    main()
