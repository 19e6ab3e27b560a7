"""CPU detection and the choice of instruction set, on this machine and on made-up ones."""

import ast
import platform
from pathlib import Path

import pytest
from engine_check import usable_isas

from anyprec import _native
from anyprec.errors import UnsupportedIsa
from anyprec.run.cpu import cpu_features, cpu_name, isa

X86 = platform.machine().lower() in ("x86_64", "amd64")
ARM = platform.machine().lower() in ("aarch64", "arm64")
FOREIGN = "neon" if X86 else "avx2"  # known, but never built on this architecture

AVX2 = ["avx2", "fma"]
CASCADE_LAKE = [*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"]
AVX512 = [*CASCADE_LAKE, "avx512vbmi", "avx512_vpopcntdq"]
AMX = [*AVX512, "amx_tile", "amx_int8", "amx_permission"]

# Register bits (Intel's manual, volume 2A, CPUID; volume 1, 13.3 for XCR0)
FMA, AVX = 1 << 12, 1 << 28  # leaf 1, ecx
HAS_AVX2, F, DQ, BW, VL = 1 << 5, 1 << 16, 1 << 17, 1 << 30, 1 << 31  # leaf 7, ebx
VBMI, VNNI, VPOPCNTDQ = 1 << 1, 1 << 11, 1 << 14  # leaf 7, ecx
TILE, TILE_INT8 = 1 << 24, 1 << 25  # leaf 7, edx
AVX_VNNI, AVX512_BF16 = 1 << 4, 1 << 5  # leaf 7.1, eax
SAVES_YMM, SAVES_ZMM, SAVES_TILES = 0x7, 0xE7, 0x600E7
ASIMD, ASIMDDP, I8MM = 1 << 1, 1 << 20, 1 << 13  # Linux on ARM: hwcap, hwcap, hwcap2


def server(xcr0: int) -> list[str]:
    """A CPU with everything, under an operating system that saves the registers in xcr0."""
    ebx = HAS_AVX2 | F | DQ | BW | VL
    return _native.decode_cpuid(FMA | AVX, ebx, VBMI | VNNI | VPOPCNTDQ, TILE | TILE_INT8, AVX_VNNI | AVX512_BF16, xcr0)


def test_this_cpu_has_a_name():
    assert cpu_name() == cpu_name().strip() != ""


@pytest.mark.skipif(not X86 or not Path("/proc/cpuinfo").exists(), reason="compares with Linux on x86")
def test_features_are_those_linux_reports():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line for line in lines if line.startswith("flags")).split(":")[1].split()
    ours = set(server(SAVES_TILES))  # every name we know
    assert set(cpu_features()) - {"amx_permission"} == ours & set(flags)
    name = next(line for line in lines if line.startswith("model name")).split(":")[1].strip()
    assert cpu_name() == name


@pytest.mark.skipif(not ARM, reason="aarch64 only")
def test_aarch64_always_has_neon(monkeypatch):
    assert cpu_features()[0] == "asimd"
    monkeypatch.delenv("ANYPREC_ISA", raising=False)
    levels = [level for level in ("neon", "dotprod", "i8mm") if level in _native.built_isas()]
    assert isa() in levels or not levels  # Windows: scalar only


@pytest.mark.parametrize(
    ("hwcap", "hwcap2", "features"),
    [  # bits of Linux, arch/arm64/include/uapi/asm/hwcap.h
        (0, 0, []),
        (ASIMD, 0, ["asimd"]),  # Cortex-A53, A57, A72
        (ASIMD | ASIMDDP, 0, ["asimd", "asimddp"]),  # Cortex-A76
        (ASIMD | ASIMDDP, I8MM, ["asimd", "asimddp", "i8mm"]),  # Neoverse V1
        (~(ASIMD | ASIMDDP) & 2**64 - 1, ~I8MM & 2**64 - 1, []),  # everything else
    ],
)
def test_features_of_arm_are_told_apart(hwcap, hwcap2, features):
    assert _native.decode_hwcap(hwcap, hwcap2) == features


@pytest.mark.skipif(not ARM or "neon" not in _native.built_isas(), reason="levels of ARM")
@pytest.mark.parametrize(
    ("features", "level"),
    [
        ([], "scalar"),
        (["asimd"], "neon"),
        (["asimd", "asimddp"], "dotprod"),
        (["asimd", "i8mm"], "neon"),
        (["asimd", "asimddp", "i8mm"], "i8mm"),
    ],
)
def test_the_best_level_of_arm_is_chosen(features, level):
    assert _native.choose_isa("", features) == level


def test_levels_are_ordered():
    """The last one that a CPU can run is taken, so a level comes after all that it contains."""
    known = _native.known_isas()
    assert known[0] == "scalar"
    assert known.index("neon") < known.index("dotprod") < known.index("i8mm")
    x86 = ["avx2", "avxvnni", "avx512vnni", "avx512", "amx"]
    assert [name for name in known if name in x86] == x86


def test_everything_is_found_on_a_cpu_that_has_everything():
    assert set(server(SAVES_TILES)) == {*AVX512, "avx_vnni", "avx512_bf16", "amx_tile", "amx_int8"}


def test_no_wide_registers_unless_the_operating_system_saves_them():
    assert server(0) == []
    assert server(0x3) == []  # x87 and SSE only
    assert set(server(SAVES_YMM)) == {*AVX2, "avx_vnni"}
    assert set(server(SAVES_ZMM & ~0x20)) == {*AVX2, "avx_vnni"}  # mask registers not saved
    for half in (0x20000, 0x40000):  # configuration of tiles or their data only
        assert set(server(SAVES_ZMM | half)) == {*AVX512, "avx_vnni", "avx512_bf16"}


def test_features_are_told_apart():
    haswell = _native.decode_cpuid(FMA | AVX, HAS_AVX2, 0, 0, 0, SAVES_YMM)
    assert haswell == AVX2
    alder_lake = _native.decode_cpuid(FMA | AVX, HAS_AVX2, 0, 0, AVX_VNNI, SAVES_YMM)
    assert set(alder_lake) == {*AVX2, "avx_vnni"}
    knights_landing = _native.decode_cpuid(FMA | AVX, HAS_AVX2 | F, 0, 0, 0, SAVES_ZMM)
    assert set(knights_landing) == {*AVX2, "avx512f"}
    sandy_bridge = _native.decode_cpuid(AVX, 0, 0, 0, 0, SAVES_YMM)
    assert sandy_bridge == []
    cascade_lake = _native.decode_cpuid(FMA | AVX, HAS_AVX2 | F | DQ | BW | VL, VNNI, 0, 0, SAVES_ZMM)
    assert set(cascade_lake) == set(CASCADE_LAKE)
    zen4 = _native.decode_cpuid(FMA | AVX, HAS_AVX2 | F, 0, 0, AVX512_BF16, SAVES_ZMM)
    assert set(zen4) == {*AVX2, "avx512f", "avx512_bf16"}
    assert _native.decode_cpuid(FMA | AVX, HAS_AVX2 | F, 0, 0, AVX512_BF16, SAVES_YMM) == AVX2
    bfloat_only = _native.decode_cpuid(FMA | AVX, HAS_AVX2, 0, TILE, 0, SAVES_TILES)
    assert set(bfloat_only) == {*AVX2, "amx_tile"}


@pytest.mark.skipif(not X86, reason="levels of x86")
@pytest.mark.parametrize(
    ("features", "level"),
    [
        ([], "scalar"),
        (["avx2"], "scalar"),  # no fma
        (AVX2, "avx2"),
        ([*AVX2, "avx512f"], "avx2"),
        ([*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq"], "avx2"),  # Skylake: no VNNI
        (CASCADE_LAKE, "avx512vnni"),
        ([*CASCADE_LAKE, "avx512_bf16"], "avx512vnni"),  # Cooper Lake
        (AVX512, "avx512"),
        ([*AVX512, "avx_vnni"], "avx512"),
        ([*AVX2, "avx_vnni"], "avxvnni"),
        ([*AVX512, "amx_tile", "amx_int8"], "avx512"),  # refused by the operating system, or by the probe
        (AMX, "amx"),
        ([*AVX2, "amx_tile", "amx_int8", "amx_permission"], "avx2"),
    ],
)
def test_the_best_level_is_chosen(features, level):
    if level not in _native.built_isas():
        pytest.skip(f"this compiler does not know {level}")
    assert _native.choose_isa("", features) == level


def test_a_wish_for_less_is_granted(monkeypatch):
    monkeypatch.setenv("ANYPREC_ISA", "scalar")
    assert isa() == "scalar"


def test_an_empty_wish_is_no_wish(monkeypatch):
    monkeypatch.delenv("ANYPREC_ISA", raising=False)
    best = isa()
    monkeypatch.setenv("ANYPREC_ISA", "")
    assert isa() == best


def test_every_built_level_is_known():
    assert set(_native.built_isas()) <= set(_native.known_isas())
    assert isa() in _native.built_isas()


def test_an_unknown_wish(monkeypatch):
    monkeypatch.setenv("ANYPREC_ISA", "avx3")
    with pytest.raises(UnsupportedIsa, match=r"^ANYPREC_ISA=avx3 is no instruction set .* unset it$"):
        isa()


def test_a_wish_that_is_not_built_in(monkeypatch):
    monkeypatch.setenv("ANYPREC_ISA", FOREIGN)
    with pytest.raises(UnsupportedIsa, match=rf"^ANYPREC_ISA={FOREIGN} is not built into .* unset it$"):
        isa()


@pytest.mark.skipif(not X86, reason="levels of x86")
def test_a_wish_this_cpu_cannot_run():
    message = (
        r"^ANYPREC_ISA=avx512 cannot run on this CPU, which lacks avx512bw, avx512vl, avx512dq, "
        r"avx512_vnni, avx512vbmi, avx512_vpopcntdq; choose one of scalar, avx2, or unset it$"
    )
    with pytest.raises(UnsupportedIsa, match=message):
        _native.choose_isa("avx512", [*AVX2, "avx512f"])


@pytest.mark.skipif(not X86, reason="levels of x86")
def test_lookups_of_64_bytes_on_a_cpu_without_them():
    message = (
        r"^ANYPREC_ISA=avx512 cannot run on this CPU, which lacks avx512vbmi, avx512_vpopcntdq; "
        r"choose one of scalar, avx2, avx512vnni, or unset it$"
    )
    with pytest.raises(UnsupportedIsa, match=message):
        _native.choose_isa("avx512", CASCADE_LAKE)


@pytest.mark.skipif("amx" not in _native.built_isas(), reason="AMX is not built in")
def test_amx_that_was_refused():
    message = (
        r"^ANYPREC_ISA=amx cannot run on this CPU, which lacks amx_permission; "
        r"choose one of scalar, avx2, avx512vnni, avx512, or unset it$"
    )
    with pytest.raises(UnsupportedIsa, match=message):
        _native.choose_isa("amx", AMX[:-1])


def test_permission_is_asked_for_only_where_the_cpu_has_amx():
    features = cpu_features()
    assert "amx_int8" in features or "amx_permission" not in features


def test_the_stub_names_what_the_extension_has():
    stub = Path(__file__).parents[2] / "src" / "anyprec" / "_native.pyi"
    nodes = ast.parse(stub.read_text()).body
    typed = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert typed == {name for name in dir(_native) if not name.startswith("_")}


def test_kernel_rates():
    for name in usable_isas():
        rates = _native.kernel_rates(name)
        assert rates == _native.kernel_rates(name)  # measured once
        assert all(rate > 0 and vectors in (1, 2, 4, 8) for _, vectors, rate in rates)
    with pytest.raises(UnsupportedIsa, match="isa=vax is no instruction set anyprec knows"):
        _native.kernel_rates("vax")
