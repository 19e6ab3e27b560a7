"""For all tests of pack: networks with norms that do something, and the comparison of a Graph with its torch module."""

import numpy as np
import pytest
import torch
from torch import nn

from anyprec.nn.switching import bits
from anyprec.packing.packing import make_graph
from anyprec.run.oracle import run_graph


def shake(model: nn.Module, seed: int = 0, positive: bool = False) -> nn.Module:
    """Random statistics, gammas of both signs (or `positive` ones) and betas in every norm table; ranges and scales a
    little off.
    """
    dice = torch.Generator().manual_seed(seed)

    def draw(like, low, high):
        return torch.rand(like.shape, generator=dice) * (high - low) + low

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.copy_(draw(module.running_mean, -0.4, 0.4))
                module.running_var.copy_(draw(module.running_var, 0.3, 1.5))
                module.weight.copy_(draw(module.weight, 0.3, 1.2))
                module.weight[::5] *= 1 if positive else -1
                module.bias.copy_(draw(module.bias, -0.3, 0.6))
        for name, parameter in model.named_parameters():
            if ".ranges." in name or ".scales." in name:
                parameter.mul_(draw(parameter, 0.8, 1.0))
    return model.eval()


@pytest.fixture(scope="session")
def shaken():
    """shaken(model): `shake`, for tests that pack by themselves."""
    return shake


def tensors(output):
    """All tensors of a network's output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    return [t for part in (output.values() if hasattr(output, "values") else output) for t in tensors(part)]


def outputs_of(graph, x, profile):
    """The oracle's outputs in torch's order of dimensions, vectors as (N, C)."""
    made = run_graph(graph, np.ascontiguousarray(x.permute(0, 2, 3, 1).numpy()), profile)
    return [made[name].transpose(0, 3, 1, 2) for name in graph.outputs]


def check_profile(model, graph, x, setting, profile):
    """Float rounding may move a few codes by one, so: nearly all numbers close, none far off.

    Gives whether the output depends on the image: random networks may be dead at 1 bit.
    """
    with torch.no_grad(), bits(model, setting):
        wanted = tensors(model(x))
    given = outputs_of(graph, x, profile)
    assert len(wanted) == len(given)
    for a, b in zip(wanted, given, strict=True):
        a = a.numpy().reshape(b.shape)
        spread = a.std() + 1e-6
        gap = np.abs(a - b) / spread
        assert np.median(gap) < 1e-5, (profile, np.median(gap))
        assert gap.max() < 0.3, (profile, gap.max())
    return a.std(axis=0).max() > 1e-4 * spread


@pytest.fixture
def agree():
    """agree(model, x): packs at every width with float, compares each with torch; gives the Graph."""

    def compare(model, x, example=None, positive=False, **options):
        shake(model, positive=positive)
        options.setdefault("keep_float", True)
        graph = make_graph(model, example=x[:1] if example is None else example, **options)
        by_name = {p.name: p for p in options.get("profiles", ())}
        alive = [check_profile(model, graph, x, by_name.get(p.name) or int(p.name), p.name) for p in graph.profiles]
        assert 2 * sum(alive) > len(alive), f"{alive}: the network gives the same for every image, this tests nothing"
        return graph

    return compare


@pytest.fixture
def kinds():
    """kinds(graph): how often each operation occurs."""

    def count(graph):
        found = [op.kind for op in graph.ops]
        return {kind: found.count(kind) for kind in found}

    return count


def as_array(x):
    """An input as the file takes it: images (N, H, W, C), others in torch's order."""
    return np.ascontiguousarray((x.permute(0, 2, 3, 1) if x.dim() == 4 else x).numpy())


@pytest.fixture
def matches():
    """matches(net, *inputs): converts, packs, and compares the oracle with torch at 2 and 8 bit and float.

    At float every number is close; at integer widths nearly all are, since rounding may move single codes. Gives the
    Graph, which the format's own checks accept.
    """
    from anyprec.format.check import check_graph
    from anyprec.format.record import to_record
    from anyprec.nn.convert import convert

    def compare(net, *inputs, widths=(2, 8, 32), example=None, **options):
        example = example or (inputs[0] if len(inputs) == 1 else inputs)
        model = convert(net.eval(), widths=widths, example=example)
        graph = make_graph(model, example=example, keep_float=True, **options)
        check_graph(to_record(graph, {}))
        check_against(model, graph, *inputs)
        return graph

    return compare


@pytest.fixture
def against():
    """against(model, graph, *inputs): compares a Graph with the module it was made from."""
    return check_against


def check_against(model, graph, *inputs):
    more = [op.name for op in graph.ops if op.kind == "input"]
    first = as_array(inputs[0])
    first = first.reshape(len(first), 1, 1, -1) if first.ndim == 2 and len(graph.input_shape) == 3 else first
    given = dict(zip(more, map(as_array, inputs[1:]), strict=True))
    for profile in graph.profiles:
        made = run_graph(graph, first, profile.name, more=given)
        with torch.no_grad(), bits(model, int(profile.name)):
            wanted = tensors(model(*inputs))
        assert len(wanted) == len(graph.outputs)
        for name, b in zip(graph.outputs, wanted, strict=True):
            a = made[name].transpose(0, 3, 1, 2) if b.dim() == 4 else made[name]
            gap = np.abs(a.reshape(b.shape) - b.numpy())
            if profile.name == "32":
                assert gap.max() <= 1e-5 * float(b.abs().max()), (profile.name, gap.max())
            else:
                assert np.median(gap) <= 1e-5 * float(b.std()), (profile.name, np.median(gap))
                assert gap.max() < 0.3 * float(b.std()), (profile.name, gap.max())
