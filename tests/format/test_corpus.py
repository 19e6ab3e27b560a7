"""The files of corpus/ behave as their names say, in every later version; and the fuzzer that starts from them runs.

corpus/ERROR-what.apm gives that error, corpus/opens-what.apm opens. They are kept as they were written.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from anyprec import errors
from anyprec import format as apm
from anyprec.format.schema import SCHEMAS

CORPUS = sorted(Path(__file__).with_name("corpus").glob("*.apm"))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_corpus(path):
    expected = path.name.partition("-")[0]
    if expected == "opens":
        assert apm.read(path, verify=True).profiles
        return
    with pytest.raises(errors.ModelFileError) as caught:
        apm.read(path, verify=True)
    assert type(caught.value) is getattr(errors, expected)


def test_the_corpus_has_every_op_and_every_error():
    opening = [path for path in CORPUS if path.name.startswith("opens")]
    assert {op.kind for path in opening for op in apm.read(path).ops} == set(SCHEMAS)
    named = {kind.__name__ for kind in errors.ModelFileError.__subclasses__()}
    named -= {"UnknownModel", "CascadeError"}  # of names, and of calls: not of reading a file
    assert {path.name.partition("-")[0] for path in CORPUS} == named | {"opens"}


def test_golden_file(tiny, same):
    """Version 1, as it was first written: every number comes out the same."""
    by_name = {path.stem: path for path in CORPUS}
    same(tiny(), apm.read(by_name["opens-nested"]))
    same(tiny(nested=False, keep_float=True), apm.read(by_name["opens-separate-float"]))
    same(tiny(fixed=True, keep_float=True), apm.read(by_name["opens-fixed-bits"]))


@pytest.mark.thorough
def test_the_fuzzer_runs(tmp_path):
    script = Path(__file__).with_name("fuzz_reader.py")
    command = [sys.executable, str(script), "--runs", "300", "--seed", "1", "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "300 files, 0 findings" in done.stdout
