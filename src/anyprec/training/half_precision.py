"""Whether torch's half precision works on this CPU: asked in a process of its own, where the answer may be a crash.

On CPUs with AMX whose hypervisor hides part of CPUID, oneDNN's bf16 products end the process with an illegal
instruction. `hold_onednn` finds the most capable instruction set at which they work and sets ONEDNN_MAX_CPU_ISA to it.
oneDNN reads that variable once, so this module imports no torch: cli/train.py and the tests call it before they do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache

from anyprec.errors import RecipeError

VARIABLE = "ONEDNN_MAX_CPU_ISA"
# Tried in this order: no limit, AVX-512 without AMX, without bf16 instructions, AVX2.
LIMITS = ("", "AVX512_CORE_BF16", "AVX512_CORE_VNNI", "AVX2")
KINDS = {"bf16": "bfloat16", "fp16": "float16"}  # as recipes call them -> as torch does
SECONDS = 120  # importing torch on a cold, busy machine takes 20

# Sizes at which oneDNN takes its fast kernels: products, linear layers and convolutions, forward and backward.
PROGRAM = """
import contextlib, sys
with contextlib.suppress(Exception):
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer, no reason for a core file
import torch
kind = getattr(torch, sys.argv[1])
a = torch.ones(128, 128).to(kind)
assert float((a @ a)[0, 0]) == 128
net = torch.nn.Sequential(torch.nn.Conv2d(32, 64, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64 * 36, 64))
for data in (torch.ones(8, 32, 8, 8), torch.ones(8, 32, 8, 8).to(memory_format=torch.channels_last)):
    with torch.autocast("cpu", kind):
        loss = net(data).float().mean()
    loss.backward()
    net.to(kind)(data.to(kind)).float().mean().backward()
    net.float()
"""


@cache
def probe(kind: str, limit: str) -> str:
    """Runs PROGRAM with oneDNN held to `limit` ("": not held): "" if it ends well, else how it ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop(VARIABLE, None)
    if limit:
        environment[VARIABLE] = limit
    command = [sys.executable, "-c", PROGRAM, KINDS[kind]]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS} s"
    if done.returncode < 0:
        return f"it dies of {signal.Signals(-done.returncode).name}"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return ""


def hold_onednn(kind: str) -> str:
    """Set ONEDNN_MAX_CPU_ISA so that half precision works, before torch is imported; returns a line to print, or "".

    A value that the user has set is kept. Where nothing helps, nothing is set: `require_half_precision` refuses then.
    """
    if os.environ.get(VARIABLE) or not (why := probe(kind, "")):
        return ""
    limit = next((limit for limit in LIMITS[1:] if not probe(kind, limit)), "")
    if not limit:
        return ""
    os.environ[VARIABLE] = limit
    return f"torch's {kind} products do not work on this CPU ({why}); {VARIABLE}={limit} is set for this run"


def require_half_precision(kind: str) -> None:
    """Raise RecipeError if `kind` does not work with the environment as it is. torch may be imported already."""
    why = probe(kind, os.environ.get(VARIABLE, ""))
    if why:
        raise RecipeError(unusable(kind, why))


def unusable(kind: str, why: str) -> str:
    return (
        f"amp={kind!r} does not work on this CPU ({why}); set amp to 'off', or {VARIABLE}, before Python starts, to "
        f"the first of {', '.join(LIMITS[1:])} with which it does"
    )
