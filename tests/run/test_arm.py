"""The engine for 64-bit ARM, cross-compiled and emulated (arm.py): the same bits as scalar and as the oracle.

The build takes minutes, so these tests are slow; they are skipped where the cross compiler or qemu is missing.
"""

import shutil

import arm
import hot_loops
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(arm.missing()), reason=arm.missing() or "-")]


@pytest.fixture(scope="module")
def folder():
    arm.build(arm.BUILD, arm.TOOLCHAIN)
    return arm.BUILD


def test_the_reader(folder):
    arm.check_reader(folder)


def test_a_cpu_gets_the_best_kernels_it_can_run(folder):
    arm.check_dispatch(folder)


@pytest.mark.parametrize("isa", arm.CPUS)
def test_every_kernel_gives_what_scalar_gives(folder, isa):
    arm.check_kernels(arm.emulated(folder / "bench_kernels", arm.CPUS[isa]), isa)


@pytest.mark.parametrize("isa", arm.CPUS)
def test_every_kernel_is_chosen(folder, isa):
    arm.check_every_kernel_is_chosen(arm.emulated(folder / "anyprec-run"), isa)


def test_graphs_give_what_the_oracle_gives(folder):
    count, runs = arm.check_graphs(arm.emulated(folder / "anyprec-run"), list(arm.CPUS), seeds=3, every=4)
    assert count > 20 and runs > 100


@pytest.mark.skipif(shutil.which(hot_loops.ARM.objdump) is None, reason=f"needs {hot_loops.ARM.objdump}")
@pytest.mark.parametrize("isa", arm.CPUS)
def test_hot_loops_keep_their_accumulators_in_registers(folder, isa):
    """A vector that goes to the stack in every step halves the speed; a compiler may do that without a word."""
    objects = folder / "CMakeFiles" / "anyprec_engine.dir" / "native" / "kernels"
    loops = list(hot_loops.loops(objects / f"kernels_{isa}.cpp.o", hot_loops.ARM))
    assert len(loops) > 50
    assert [f"{loop.kernel} {loop.tile}" for loop in loops if loop.spills] == []
