"""Switched norms: one full set of parameters and statistics per width, selected by key.

A key is a width ('1'..'8', '32') or the name of a mixed profile. Batch norms keep (gamma, beta, mean,
variance) per key, layer and group norms (gamma, beta). `BatchNorm1d/2d` here are torch's, able to share their
batch statistics between processes on any device (torch's SyncBatchNorm is for GPUs alone). Switched by
switching.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anyprec.errors import ProfileError, UncalibratedBits
from anyprec.widths import check_widths


class _SumOverProcesses(torch.autograd.Function):
    """The sum of all processes' x. Each of them reads it, so their gradients add up on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


def _sum_over_processes(x: Tensor) -> Tensor:
    total: Tensor = _SumOverProcesses.apply(x)  # type: ignore[no-untyped-call]
    return total


class _AcrossProcesses(nn.modules.batchnorm._BatchNorm):
    """Batch statistics over the batch of all processes, when `sync` is set and there are several."""

    sync = False

    def forward(self, x: Tensor) -> Tensor:
        if not (self.sync and self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        given = x.dtype
        x = x.float() if given in (torch.float16, torch.bfloat16) else x  # sums need the digits
        axes = [0, *range(2, x.dim())]
        shape = [1, -1] + [1] * (x.dim() - 2)
        # Sums and count travel together; the count differs between processes where the last batch is short.
        sums = _sum_over_processes(torch.cat([x.sum(axes), x.new_tensor([x.numel() // x.shape[1]])]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centered = x - mean.view(shape)
        variance = _sum_over_processes(centered.square().sum(axes)) / count
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None  # torch makes all three or none
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean), share)
                self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var), share)
        y = centered * torch.rsqrt(variance + self.eps).view(shape)
        y = y if self.weight is None else y * self.weight.view(shape)
        return (y if self.bias is None else y + self.bias.view(shape)).to(given)


class BatchNorm1d(_AcrossProcesses, nn.BatchNorm1d):
    pass


class BatchNorm2d(_AcrossProcesses, nn.BatchNorm2d):
    pass


class SwitchNorm(nn.Module):
    """`tables[key]` is a plain norm; `key` selects the one in use.

    `follows` is the name of the any-layer run before it: under a plain dict of bits the norm takes that
    layer's width.
    """

    def __init__(self, widths: Iterable[int], make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({str(k): make() for k in check_widths(widths)})
        self.key = list(self.tables)[-1]
        self.follows: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.table(self.key)(x)
        return y

    def table(self, key: str) -> nn.Module:
        if key not in self.tables:
            what, how = f"bits={key}", f"widths=({key},)"
            if not key.isdigit():
                what, how = f"profile {key!r}", "profiles=(profile,)"
            raise UncalibratedBits(
                f"{what} has no norm tables (there are {', '.join(self.tables)}); calibrate it first: "
                f"anyprec.calibrate(model, loader, {how})"
            )
        return self.tables[key]

    def add_table(self, key: str, like: str) -> nn.Module:
        """A new table under `key`, a copy of the one under `like`. Replaces one that is there."""
        if key not in self.tables and hasattr(self.tables, key):
            raise ProfileError(
                f"profile name {key!r} is a word torch keeps for itself; choose another, such as {key}_1"
            )
        self.tables[key] = copy.deepcopy(self.table(like))
        return self.tables[key]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A checkpoint may hold tables calibrated after the model was built.
        start = prefix + "tables."
        for name in state_dict:
            if name.startswith(start) and (key := name[len(start) :].split(".")[0]) not in self.tables:
                self.add_table(key, self.key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"key={self.key!r}"


class SwitchBatchNorm1d(SwitchNorm):
    def __init__(self, num_features: int, widths: Iterable[int], **options: Any) -> None:
        super().__init__(widths, lambda: BatchNorm1d(num_features, **options))


class SwitchBatchNorm2d(SwitchNorm):
    def __init__(self, num_features: int, widths: Iterable[int], **options: Any) -> None:
        super().__init__(widths, lambda: BatchNorm2d(num_features, **options))


class SwitchLayerNorm(SwitchNorm):
    def __init__(self, normalized_shape: int | tuple[int, ...], widths: Iterable[int], **options: Any) -> None:
        super().__init__(widths, lambda: nn.LayerNorm(normalized_shape, **options))


class SwitchGroupNorm(SwitchNorm):
    def __init__(self, num_groups: int, num_channels: int, widths: Iterable[int], **options: Any) -> None:
        super().__init__(widths, lambda: nn.GroupNorm(num_groups, num_channels, **options))


def hook_names() -> list[str]:
    """The attributes in which a module keeps the hooks of its calls."""
    return [name for name in vars(nn.Module()) if name.startswith(("_forward", "_backward"))]


def sync_norms(model: nn.Module, on: bool = True) -> None:
    """Let every batch norm of ours share batch statistics between processes; no effect in a single one."""
    for module in model.modules():
        if isinstance(module, _AcrossProcesses):
            module.sync = on
