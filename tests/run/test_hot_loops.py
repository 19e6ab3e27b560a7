"""The inner loops of the x86 kernels, as the compiler here makes them: no vector goes to the stack in them.

gcc spills accumulators where a loop is written slightly differently, without a word, and the kernel runs at half speed.
Compiling the kernels takes a minute, so these tests are slow; ANYPREC_OBJECTS names a folder that has their objects.
"""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import hot_loops
import pytest

ROOT = Path(__file__).resolve().parents[2]
IS_X86 = platform.machine() in ("x86_64", "AMD64")
# Spills that are accepted: one vector in the row of a classifier, which waits for memory, and in the stem up to four
# in the 72 multiplications of six steps.
ROW, STEM = "Loop<Multiply> 1, 8", "ToomCookTiles "


def flags(file):
    """Of this file in CMakeLists.txt, whose word on it is the only one."""
    text = (ROOT / "CMakeLists.txt").read_text()
    found = re.findall(rf'kernels_{file}\.cpp PROPERTIES COMPILE_OPTIONS\s+"([^"]+)"', text)
    assert len(found) == 1
    words = found[0]
    while name := re.search(r"\$\{(\w+)\}", words):  # the first `set` is that of gcc and clang, not of the emulation
        value = re.search(rf"set\({name[1]} ([^)]+)\)", text)
        words = words.replace(name[0], value[1])
    return words.split()


def compiled(file, folder):
    kept = os.environ.get("ANYPREC_OBJECTS")
    if kept:
        return Path(kept) / f"kernels_{file}.cpp.o"
    made = folder / f"{file}.o"
    words = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-c", *flags(file), "-I", ROOT / "native"]
    words += ["-I", ROOT / "native" / "include", ROOT / "native" / "kernels" / f"kernels_{file}.cpp", "-o", made]
    subprocess.run(words, check=True)
    return made


needs = pytest.mark.skipif(
    not IS_X86 or not shutil.which("g++") or not shutil.which("objdump"), reason="needs x86-64, g++ and objdump"
)


@needs
@pytest.mark.slow
@pytest.mark.parametrize(
    "file, least, kernels",  # tiles, and kernels that must be among them
    [
        ("avx2", 150, {"PairLookUp", "Loop<DotWide>", "DotSplit"}),
        ("avx512", 60, {"PairLookUp", "Loop<Dot>", "SharedPixels<Dot>"}),
        ("vbmi", 20, {"Loop<LookUp<1>>", "Loop<LookUp<2>>", "Loop<CountBits>", "SharedPixels<CountBits>"}),
    ],
)
def test_hot_loops_keep_their_accumulators_in_registers(file, least, kernels, tmp_path):
    loops = list(hot_loops.loops(compiled(file, tmp_path), hot_loops.X86))
    assert len(loops) > least
    assert kernels <= {loop.kernel.replace("> >", ">>") for loop in loops}
    spilling = [f"{loop.kernel} {loop.tile}" for loop in loops if loop.spills]
    assert [name for name in spilling if name != ROW and not name.startswith(STEM)] == []


@needs
def test_a_spill_is_seen(tmp_path):
    """Twenty accumulators do not fit sixteen registers."""
    source = """
    #include <immintrin.h>
    namespace anyprec {
    struct Many { template <int R, int V> static void tile(const float *x, const __m256 *w, __m256 *y, int n); };
    template <int R, int V> void Many::tile(const float *x, const __m256 *w, __m256 *y, int n) {
        __m256 acc[R][V];
    #pragma GCC unroll 40
        for (int i = 0; i < R * V; ++i) acc[i / V][i % V] = __m256{};
        for (int s = 0; s < n; ++s)
    #pragma GCC unroll 40
            for (int i = 0; i < R * V; ++i)
                acc[i / V][i % V] = _mm256_fmadd_ps(
                    _mm256_set1_ps(x[s * R + i / V]), w[s * V + i % V], acc[i / V][i % V]);
    #pragma GCC unroll 40
        for (int i = 0; i < R * V; ++i) y[i] = acc[i / V][i % V];
    }
    template void Many::tile<5, 2>(const float *, const __m256 *, __m256 *, int);
    template void Many::tile<10, 2>(const float *, const __m256 *, __m256 *, int);
    }
    """
    (tmp_path / "many.cpp").write_text(source)
    words = ["g++", "-std=c++17", "-O2", "-mavx2", "-mfma", "-c", "many.cpp", "-o", "many.o"]
    subprocess.run(words, check=True, cwd=tmp_path)
    spills = {loop.tile: loop.spills > 0 for loop in hot_loops.loops(tmp_path / "many.o", hot_loops.X86)}
    assert spills == {"5, 2": False, "10, 2": True}
