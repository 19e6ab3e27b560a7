"""Half precision on a CPU where torch's bf16 products end the process, as behind AMX without its palette."""

import signal

import pytest
from blackbox import anyprec

# Such a CPU, for processes with this file on their path: autocast to bf16 dies unless oneDNN is held to less than AMX.
SITE = """
import importlib.util, os, signal, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            enter = module.autocast.__enter__
            def dies(self):
                if os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX") == "AVX512_CORE_AMX":
                    os.kill(os.getpid(), signal.SIGILL)
                return enter(self)
            module.autocast.__enter__ = dies
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
RECIPE = 'net = "resnet8"\ndata = "digits"\nwidths = [8]\nepochs = 1\nlimit = 64\nbatch_size = 32\namp = "bf16"\n'


@pytest.mark.slow
def test_training_with_amp_is_no_crash(tmp_path):
    """`anyprec train` with amp died of an illegal instruction, without a word."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (tmp_path / "r.toml").write_text(RECIPE)
    done = anyprec("train", tmp_path / "r.toml", "--out", tmp_path / "run", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode != -signal.SIGILL, "the training died of SIGILL"
    assert done.returncode == 0 and "SIGILL" in done.stderr, done.stderr
