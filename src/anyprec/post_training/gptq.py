"""GPTQ with nested codes: a converted network and some images in; its codes, scales, ranges and norms out.

One lockstep pass (lockstep.py). At each layer, in the order of execution, with all layers before it quantized:
1. the range of its input, for each width, that costs its output least;
2. the weight it should have at each width: the ridge regression of float's output on its quantized input;
3. one 8-bit code per weight, of least summed error over all widths (nested_codes.py);
4. a scale and a shift per output channel and width, from the outputs it then has.
Norms that do not follow a layer at once are corrected in the same way as 4. `tune.py` then refines what each width
has of its own. No labels. Called by methods.py; docs/cli/ptq.md says what each part is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyprec.errors import AnyprecError
from anyprec.nn.act_quantizer import best_range, sample_values
from anyprec.nn.layers import AnyConv1d, AnyConv2d, AnyLayer, AnyLinear
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.observe import InputQuantizer
from anyprec.nn.own_forward import has_plain_weight
from anyprec.nn.quantizers import ChosenCodes
from anyprec.post_training.lockstep import LockstepVisitor
from anyprec.post_training.nested_codes import NestedProblem, choose_codes
from anyprec.progress import Progress
from anyprec.widths import FLOAT

CLIPS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4)  # tried, times the range of least squared error
SEARCH_VALUES = 4_000_000  # of a layer's input, or output, that ranges are tried on
POSITIONS = 8192  # pixels (or rows) of all images that second moments are taken over, and at least 4 a column
SURE_POSITIONS = 16  # as many positions as these count for the scale that a channel has; fewer choose no clip
FEW_POSITIONS = 0.1  # damping, times weights of an output per position: few positions are fitted, and others suffer
LEAST = 1e-12
MARGIN = 2.0  # of a depth-wise channel's range over the largest value seen
LEAST_RANGE = 1 / 64  # of a depth-wise channel, relative to the layer's


@dataclass(frozen=True)
class GptqSettings:
    """Parts of the method, for experiments; the defaults were chosen on images of CIFAR-10's training set."""

    importance: float = 2.0  # of a width's error, relative to that of the next narrower one
    damping: float = 0.01  # of the mean second moment, added to all of them
    sweeps: int = 2  # over the columns of a weight, after the first pass
    shrink: float = 1.0  # outputs: 0 gives them float's variance, 1 the least squared error
    search_ranges: bool = True
    equalize: bool = True  # finer steps for the small input channels of a depth-wise convolution
    migrate: float = 0.0  # of other layers: the share of a channel's range that goes over to the weights; 0: none
    tune_steps: int = 100  # of each width that needs it; 0: closed forms only
    tune_rate: float = 1.0

    def __post_init__(self) -> None:
        if self.importance <= 0 or self.damping <= 0 or self.tune_rate <= 0:
            raise AnyprecError(f"{self}: importance, damping and tune_rate must be above 0")
        if self.sweeps < 0 or self.tune_steps < 0 or not 0 <= self.shrink <= 1 or not 0 <= self.migrate <= 1:
            raise AnyprecError(f"{self}: sweeps and tune_steps are 0 or more, shrink and migrate between 0 and 1")


class GptqVisitor(LockstepVisitor):
    """Fits each layer as the lockstep pass comes to it."""

    def __init__(self, widths: Sequence[int], settings: GptqSettings, bar: Progress | None = None) -> None:
        self.widths, self.settings, self.bar = tuple(widths), settings, bar

    def layer(self, name: str, layer: AnyLayer, given: list[Tensor]) -> None:
        equalize_channels(layer, given[0], self.settings)
        fit_input_ranges(layer, given, self.widths, self.settings.search_ranges)
        # Not transposed ones, whose columns are another matter.
        if isinstance(layer, (AnyConv1d, AnyConv2d, AnyLinear)) and has_plain_weight(layer):
            fit_codes(layer, given, self.widths, self.settings)
        if self.bar is not None:
            self.bar.update()

    def correct(self, name: str, layer: AnyLayer, made: list[Tensor]) -> list[Tensor]:
        if not isinstance(quantizer := layer.quantizer, ChosenCodes):
            return made
        axis = 1 if isinstance(layer, (AnyConv1d, AnyConv2d)) else -1
        bias = layer.bias if isinstance(layer.bias, Tensor) else torch.zeros(())
        corrected = [made[0]]
        for bits, share in zip(self.widths, made[1:], strict=True):
            a, b = affine_fit(share, made[0], axis, self.settings.shrink)
            scale, shift = quantizer.scales[str(bits)], quantizer.shifts[str(bits)]
            scale.mul_(a.reshape(scale.shape))
            shift.copy_(a * bias + b - bias)  # y = made a + b, and made has the bias in it
            corrected.append(share * on_axis(a, share, axis) + on_axis(b, share, axis))
        return corrected

    def norm(self, name: str, norm: SwitchNorm, given: list[Tensor]) -> None:
        """The statistics of a width, so that the norm gives a y + b of its input what float's gives of float's."""
        plain = norm.table(str(FLOAT))
        if not isinstance(plain, nn.modules.batchnorm._BatchNorm) or plain.running_var is None:
            return
        assert plain.running_mean is not None
        for bits, share in zip(self.widths, given[1:], strict=True):
            a, b = affine_fit(share, given[0], 1, self.settings.shrink)
            table = norm.table(str(bits))
            assert isinstance(table, nn.modules.batchnorm._BatchNorm)
            assert table.running_mean is not None and table.running_var is not None
            table.running_mean.copy_((plain.running_mean - b) / a)
            # Where float's variance is next to nothing, eps is all there is, and a cannot lower it further.
            table.running_var.copy_(((plain.running_var + plain.eps) / a.square() - plain.eps).clamp_min(0))


def on_axis(row: Tensor, like: Tensor, axis: int) -> Tensor:
    shape = [1] * like.dim()
    shape[axis] = -1
    return row.view(shape)


def affine_fit(made: Tensor, wanted: Tensor, axis: int, shrink: float) -> tuple[Tensor, Tensor]:
    """a, b per channel, so that a made + b is like `wanted`: in mean, and in variance or squared error.

    a = correlation^shrink * deviation of wanted / deviation of made. A channel that is constant keeps its scale. One
    that is seen at n positions goes n / (n + SURE_POSITIONS) of the way: two values always lie on a line.
    """
    x, y = (t.movedim(axis, 0).flatten(1) for t in (made, wanted))  # (C, n)
    mean_x, mean_y = x.mean(1), y.mean(1)
    x, y = x - mean_x[:, None], y - mean_y[:, None]
    var_x, var_y, both = x.square().mean(1), y.square().mean(1), (x * y).mean(1)
    still = (var_x < LEAST) | (var_y < LEAST)
    # Below 0.1 the channel has lost its signal: scaled by the fit it would be silenced for good.
    correlation = (both / (var_x * var_y).clamp_min(LEAST**2).sqrt()).clamp(0.1, 1)
    a = torch.where(still, 1.0, (var_y / var_x.clamp_min(LEAST)).sqrt() * correlation**shrink)
    a = 1 + (a - 1) * (x.shape[1] / (x.shape[1] + SURE_POSITIONS))
    return a, mean_y - a * mean_x


# --- Inputs ---


def equalize_channels(layer: AnyLayer, plain: Tensor, settings: GptqSettings) -> None:
    """Divisors for the channels of a layer's input, so that they fill one range better; its weights take them up.

    Cross-layer equalization (Nagel et al., ICCV 2019, arXiv:1906.04721) without another layer, whatever activation
    comes before. In a depth-wise convolution each output reads one channel, so its own scale takes the divisor up and
    nothing is lost: all channels fill the range. Other layers choose between their inputs and the columns of their
    weights: d = (largest |x|)^migrate / (largest |w|)^(1 - migrate), as SmoothQuant (Xiao et al., ICML 2023,
    arXiv:2211.10438).

    Off by default: a channel's range is then known only from the images that were seen, and on others it is cut off.
    """
    if not isinstance(layer.act, InputQuantizer) or not isinstance(layer, (AnyConv1d, AnyConv2d, AnyLinear)):
        return
    groups = 1 if isinstance(layer, AnyLinear) else layer.groups
    axis = plain.dim() - 1 if isinstance(layer, AnyLinear) else 1
    inputs = plain.movedim(axis, 0).flatten(1).abs().amax(1)  # (C,)
    migrate = settings.migrate
    if 1 < groups == len(inputs) and settings.equalize:
        divisors = channel_ranges(inputs)
    elif groups == 1 and migrate and has_plain_weight(layer):
        columns = relative(layer.weight.detach().transpose(0, 1).flatten(1).abs().amax(1))
        divisors = relative(relative(inputs) ** migrate / columns ** (1 - migrate))
    else:
        return
    layer.act.divisors = divisors.view(-1, *(1,) * (plain.dim() - 1 - axis))


def channel_ranges(largest: Tensor) -> Tensor:
    """Of depth-wise channels, relative to the layer's: MARGIN times what was seen, and never more than the layer's.

    A channel's largest value on some images is no bound for others. So only channels far below the layer's range get
    finer steps, none gets coarser ones, and one that was dead on these images keeps the layer's.
    """
    top = largest.max().clamp_min(LEAST)
    ranges = (MARGIN * largest / top).clamp(LEAST_RANGE, 1)
    return torch.where(largest > LEAST * top, ranges, 1.0)


def relative(sizes: Tensor) -> Tensor:
    """To their median. A channel that is dead on these images may not be elsewhere: it is not blown up."""
    return (sizes / sizes.median().clamp_min(LEAST)).clamp(0.01, 100)


def undivided(layer: AnyLayer, x: Tensor) -> Tensor:
    """What a layer's quantized input stands for."""
    return x if layer.act is None or layer.act.divisors is None else x * layer.act.divisors


def fit_input_ranges(layer: AnyLayer, given: list[Tensor], widths: Sequence[int], search: bool) -> None:
    """The sign, and for each width the range that costs the layer's output least, scale and shift per channel aside."""
    act = layer.act
    if not isinstance(act, InputQuantizer):
        return
    act.signed, act.undecided = any(bool((share < 0).any()) for share in given), False
    count = len(given[0])
    values = max(given[0].numel(), count * float_output(layer, given[0][:1]).numel()) if search else 1
    few = max(1, min(count, SEARCH_VALUES * count // max(values, 1)))
    wanted = None
    for bits, share in zip(widths, given[1:], strict=True):
        base = best_range(
            sample_values(share if act.divisors is None else share / act.divisors, 1 << 15), bits, act.signed
        )
        act.ranges[str(bits)].copy_(base)
        act.calibrated.add(bits)
        if search:
            if wanted is None:
                wanted = float_output(layer, given[0][:few])
            if by_channel(wanted, layer).shape[1] < SURE_POSITIONS:
                continue  # two positions lie on a line at any clip: rounding would decide
            losses = []
            for clip in CLIPS:
                act.ranges[str(bits)].copy_(base * clip)
                quantized = undivided(layer, act(share[:few], bits))
                losses.append(lost_signal(float_output(layer, quantized), wanted, layer))
            act.ranges[str(bits)].copy_(base * CLIPS[min(range(len(CLIPS)), key=losses.__getitem__)])


def float_output(layer: AnyLayer, x: Tensor) -> Tensor:
    """Of the float weight on x as it is."""
    layer.bits = FLOAT  # at which its quantizer passes x on
    return type(layer).at_bits(layer, x)


def by_channel(output: Tensor, layer: AnyLayer) -> Tensor:
    """(channels, positions)"""
    axis = 1 if output.dim() > 2 and not isinstance(layer, AnyLinear) else -1
    return output.movedim(axis, 0).flatten(1)


def lost_signal(made: Tensor, wanted: Tensor, layer: AnyLayer) -> float:
    """What no scale and shift per channel can bring back of `wanted`: its variance times 1 - correlation^2."""
    x, y = by_channel(made, layer), by_channel(wanted, layer)
    x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
    explained = (x * y).sum(1).square() / x.square().sum(1).clamp_min(LEAST)
    return float((y.square().sum(1) - explained).sum())


# --- Weights ---


def fit_codes(layer: AnyLayer, given: list[Tensor], widths: Sequence[int], settings: GptqSettings) -> None:
    """The layer's quantizer becomes one of chosen codes."""
    groups = layer.groups if isinstance(layer, (AnyConv1d, AnyConv2d)) else 1
    depth = layer.weight[0].numel()
    at = sampled_positions(layer, given[0], max(POSITIONS, 4 * depth))
    plain = input_columns(layer, given[0], at)
    weight = layer.weight.detach().reshape(groups, -1, depth)  # (G, o, c)
    divided = column_divisors(layer, groups, depth)
    damping = settings.damping + FEW_POSITIONS * depth / len(at)
    start = weight.double() * divided.transpose(1, 2)
    moments, wanted = [], []
    for bits, share in zip(widths, given[1:], strict=True):
        own = input_columns(layer, share if layer.act is None else layer.act(share, bits), at)
        both = second_moments(own, plain)
        # Each half without its own mean: less the mean of both, two positions are each other's mirror image, and what
        # fits one fits the other.
        seen, others = (second_moments(*(centered(x[..., half]) for x in (own, plain))) for half in halves(len(at)))
        change = weight_change(both, weight, start, damping)
        if len(at) > 1:
            change = change * share_that_holds(weight_change(seen, weight, start, damping), others, weight, start)
        wanted.append(start + change)
        moments.append(damped(both.own, damping))
    importance = torch.tensor([settings.importance ** (k - min(widths)) for k in widths], device=weight.device)
    problem = NestedProblem(tuple(widths), torch.stack(wanted).float(), torch.stack(moments).float(), importance)
    codes, scales = choose_codes(problem, settings.sweeps)
    shape = (-1, *(1,) * (layer.weight.dim() - 1))
    layer.quantizer = ChosenCodes(
        codes.reshape(layer.weight.shape),
        {k: s.reshape(shape).to(layer.weight.dtype).clone() for k, s in zip(widths, scales, strict=True)},
    )


class SecondMoments(NamedTuple):
    """Of a layer's input at some positions: (G, c, c) float64."""

    own: Tensor  # E[x_k x_k'], quantized
    cross: Tensor  # E[x x_k'], x float's


def halves(count: int) -> tuple[slice, slice]:
    """Positions are in the order of the images: the first of them, and the others."""
    middle = (count + 1) // 2
    return slice(middle), slice(middle, None) if count > 1 else slice(None)


def centered(columns: Tensor) -> Tensor:
    return columns - columns.mean(-1, keepdim=True)


def second_moments(own: Tensor, plain: Tensor) -> SecondMoments:
    count = own.shape[-1]
    return SecondMoments(*((x @ own.transpose(1, 2) / count).double() for x in (own, plain)))


def damped(moments: Tensor, damping: float) -> Tensor:
    """With `damping` of their mean added to the diagonal of each group's."""
    damp = damping * moments.diagonal(dim1=1, dim2=2).mean(-1).clamp_min(LEAST)
    eye = torch.eye(moments.shape[-1], dtype=moments.dtype, device=moments.device)
    return moments + damp[:, None, None] * eye


def weight_change(seen: SecondMoments, weight: Tensor, start: Tensor, damping: float) -> Tensor:
    """What a ridge regression of float's output on the quantized input adds to the weight: (G, o, c) float64."""
    lost = weight.double() @ seen.cross - start @ seen.own  # E[(y - start x_k) x_k']
    made: Tensor = torch.linalg.solve(damped(seen.own, damping), lost.transpose(1, 2)).transpose(1, 2)
    return made


def share_that_holds(change: Tensor, others: SecondMoments, weight: Tensor, start: Tensor) -> float:
    """0 to 1: the share to take of a change fitted to all images, by what one fitted to half of them does to others.

    There the share of least error is h = S / (S + N), S what can be learned and N the noise; of twice the images N is
    half as large, and the share 2 h / (1 + h).

    A layer of many weights and few positions can follow the rounding errors of the images it is shown: EfficientNet's
    projections at 8 bit (1152 weights an output, 3,136 positions of 64 photographs) then answer other images worse.
    """
    lost = weight.double() @ others.cross - start @ others.own
    squares = ((change @ others.own) * change).sum()
    held = float(((lost * change).sum() / squares.clamp_min(LEAST**2)).clamp(0, 1))
    return 2 * held / (1 + held)


def column_divisors(layer: AnyLayer, groups: int, depth: int) -> Tensor:
    """(G, c, 1) float64: what each weight of an output is multiplied by, as its input is divided by it."""
    if layer.act is None or layer.act.divisors is None:
        return torch.ones(groups, 1, 1, dtype=torch.float64, device=layer.weight.device)
    by_channel = layer.act.divisors.double().reshape(groups, -1)  # (G, C / G)
    return by_channel.repeat_interleave(depth // by_channel.shape[1], dim=1)[..., None]


def sampled_positions(layer: AnyLayer, x: Tensor, most: int) -> Tensor:
    """Numbers of output pixels, over all images, in their order: the same for every width."""
    if isinstance(layer, AnyLinear):
        count = x[..., 0].numel()
    else:
        _, _, size = window(layer, x)
        count = len(x) * size[0] * size[1]
    dice = torch.Generator().manual_seed(count)
    if count <= most:
        return torch.arange(count, device=x.device)
    return torch.randint(count, (most,), generator=dice).sort().values.to(x.device)


def input_columns(layer: AnyLayer, x: Tensor, at: Tensor) -> Tensor:
    """What each weight of an output is multiplied by, at these positions, mean taken out: (G, c, positions)."""
    if isinstance(layer, AnyLinear):
        columns = x.reshape(-1, x.shape[-1])[at][:, None]  # (positions, 1, c)
    else:
        assert isinstance(layer, (AnyConv1d, AnyConv2d))
        padded, offsets, (height, width) = window(layer, x)
        padded = padded.permute(0, 2, 3, 1).contiguous()  # a position's channels together: they are read as one
        stride = (1, *layer.stride) if isinstance(layer, AnyConv1d) else layer.stride
        image, row, column = at // (height * width), at // width % height, at % width
        row, column = row * stride[0], column * stride[1]
        taps = [padded[image, row + i, column + j] for i, j in offsets]  # each (positions, channels)
        columns = torch.stack(taps, -1).reshape(len(at), layer.groups, -1)
    columns = columns.permute(1, 2, 0)
    return columns - columns.mean(-1, keepdim=True)


def window(layer: AnyLayer, x: Tensor) -> tuple[Tensor, list[tuple[int, int]], tuple[int, int]]:
    """The padded input (N, C, H, W), the offsets of a kernel's taps in it, and the size of the output."""
    assert isinstance(layer, (AnyConv1d, AnyConv2d))
    line = isinstance(layer, AnyConv1d)
    x = x[:, :, None] if line else x
    kernel, stride, dilation = ((1, *v) if line else v for v in (layer.kernel_size, layer.stride, layer.dilation))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if layer.padding == "same":  # torch puts the odd one at the end
        before, after = [n // 2 for n in reach], [n - n // 2 for n in reach]
    else:
        sides = [0] * len(layer.kernel_size) if layer.padding == "valid" else [int(p) for p in layer.padding]
        before = after = [0, *sides] if line else sides
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, (before[1], after[1], before[0], after[0]), mode=mode)
    size = tuple((n - r - 1) // s + 1 for n, r, s in zip(x.shape[2:], reach, stride, strict=True))
    taps = [(i * dilation[0], j * dilation[1]) for i in range(kernel[0]) for j in range(kernel[1])]
    return x, taps, (size[0], size[1])
