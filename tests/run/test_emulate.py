"""AVX-512, AVX-VNNI and AMX kernels in software (emulate.py): the same bits as scalar and as the oracle.

The build takes minutes, so these tests are slow; they are skipped where the compiler or SIMDe is missing.
"""

import emulate
import pytest

LACKING = emulate.missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(LACKING), reason=LACKING or "-")]


@pytest.fixture(scope="module")
def folder():
    emulate.build(emulate.BUILD, emulate.OPTION)
    return emulate.BUILD


def test_the_probe_and_the_emulator(folder):
    emulate.check_amx(folder)


@pytest.mark.parametrize("isa", emulate.ISAS)
def test_every_kernel_gives_what_scalar_gives(folder, isa):
    emulate.check_kernels([str(folder / "bench_kernels")], isa)


@pytest.mark.parametrize("isa", emulate.ISAS)
def test_every_kernel_is_chosen(folder, isa):
    emulate.check_every_kernel_is_chosen([str(folder / "anyprec-run")], isa)


def test_layers_get_the_kernel_that_was_measured_to_be_the_fastest(folder):
    emulate.check_layers(folder)


def test_graphs_give_what_the_oracle_gives(folder):
    count, runs = emulate.check_graphs([str(folder / "anyprec-run")], emulate.ISAS, seeds=3, every=4)
    assert count > 20 and runs > 100
