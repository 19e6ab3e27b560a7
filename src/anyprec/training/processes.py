"""Several training processes, started by `torchrun` on one machine or many: who we are, and one gradient exchange.

Called by run.py. Without `torchrun` there is one process, of rank 0.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anyprec.errors import RecipeError


def usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device).zero_().sum().item()  # some devices take memory and cannot compute: "meta"
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RecipeError(f"device={name!r} cannot be used here: {reason}; give cpu, cuda, mps, ...") from error
    return device


class Processes:
    """Who we are among the processes `torchrun` started: rank 0 of 1 without it."""

    def __init__(self, device: str | None) -> None:
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local = int(os.environ.get("LOCAL_RANK", 0))
        if device is None:
            device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
        self.device = usable_device(device)
        self.started = self.world > 1 and not torch.distributed.is_initialized()
        if self.started:
            # Optimizers import it; imported with a group at hand it keeps a reference to that for good, gloo's threads
            # outlive `destroy_process_group`, and now and then one aborts the process at exit (torch 2.13).
            importlib.import_module("torch._dynamo")

            torch.distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait_for_all(self) -> None:
        if self.world > 1:
            torch.distributed.barrier()

    def share(self, model: nn.Module) -> None:
        """All processes go on from the first one's weights and statistics."""
        if self.world > 1:
            for value in model.state_dict().values():
                torch.distributed.broadcast(value, 0)

    def close(self) -> None:
        if self.started:
            torch.distributed.destroy_process_group()


def average_gradients(parameters: Sequence[nn.Parameter], extra: Tensor) -> Tensor:
    """One all-reduce for all gradients of a step (and the few numbers in `extra`), averaged over the processes.

    DistributedDataParallel cannot do this: its reducer fires in one backward pass, and would leave out the norms of
    every width but the last (docs/decisions.md). All processes chose the same widths, so the same parameters have one.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.reshape(-1).float() for g in grads] + [extra.reshape(-1).float()])
    torch.distributed.all_reduce(flat)
    flat /= torch.distributed.get_world_size()
    start = 0
    for grad in grads:
        grad.copy_(flat[start : start + grad.numel()].view_as(grad))
        start += grad.numel()
    return flat[start:].view_as(extra)
