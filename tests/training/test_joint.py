"""The joint step: gradients are the sum of the widths' own, losses are the paper's, shared work is done once."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anyprec.choices import LOSSES
from anyprec.data import IGNORED
from anyprec.errors import RecipeError
from anyprec.nn.convert import convert
from anyprec.nn.layers import AnyLinear
from anyprec.nn.switching import set_bits
from anyprec.training.joint import choose_widths, joint_step, width_loss
from anyprec.zoo import build

WIDTHS = (1, 2, 4, 8, 32)


@pytest.fixture
def step():
    torch.manual_seed(0)
    model = build("resnet8", widths=WIDTHS, multiplier=0.25).double().train()
    return model, torch.randn(8, 3, 16, 16, dtype=torch.float64), torch.randint(0, 10, (8,))


def gradients(model):
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def separate_passes(model, images, labels, mode):
    """Algorithm 1 word for word: each width by itself through the whole network."""
    outputs = {}
    for bits in sorted(WIDTHS, reverse=True):
        set_bits(model, bits)
        outputs[bits] = model(images)
        if mode == "hard" or bits == 32:
            loss = F.cross_entropy(outputs[bits], labels)
        else:
            teacher = outputs[32] if mode == "soft" else outputs[min(k for k in WIDTHS if k > bits)]
            taught = teacher.detach().softmax(1)
            if mode.startswith("wider"):
                taught = torch.stack([outputs[k].detach().softmax(1) for k in WIDTHS if k > bits]).mean(0)
            loss = F.cross_entropy(outputs[bits], taught)
            if mode.endswith("+label"):
                loss = 0.5 * loss + 0.5 * F.cross_entropy(outputs[bits], labels)
        loss.backward()
    return {bits: out.detach() for bits, out in outputs.items()}


@pytest.mark.parametrize("mode", LOSSES)
def test_gradients_are_the_sum_over_widths(step, mode):
    model, images, labels = step
    outputs = separate_passes(model, images, labels, mode)
    expected = gradients(model)
    results = joint_step(model, images, labels, WIDTHS, loss=mode)
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-8, atol=1e-10, msg=name)
    for bits, (_, right) in results.items():
        assert right == (outputs[bits].argmax(1) == labels).sum()


def test_stem_runs_once(step):
    model, images, labels = step
    calls = []
    model.conv0.register_forward_hook(lambda *_: calls.append(1))
    joint_step(model, images, labels, WIDTHS)
    assert len(calls) == 1
    assert model.conv0.weight.grad.abs().sum() > 0


def test_stem_and_body_of_a_foreign_network_mean_nothing():
    """Its own forward is what runs, whatever its parts are called."""

    class Foreign(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.body = torch.nn.Flatten(), AnyLinear(12, 5)

        def forward(self, x):
            return self.body(2 * self.stem(x)) + 1

    torch.manual_seed(0)
    model, x, y = Foreign(), torch.rand(4, 3, 2, 2), torch.zeros(4, dtype=torch.long)
    found = joint_step(model, x, y, (32,))[32][0]
    torch.testing.assert_close(found, F.cross_entropy(model(x), y).detach())


def test_model_without_stem():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), AnyLinear(12, 5))
    joint_step(model, torch.rand(4, 3, 2, 2), torch.zeros(4, dtype=torch.long), (1, 8))
    assert model[1].weight.grad.abs().sum() > 0


def test_norms_of_each_width_get_their_own_gradient(step):
    model, images, labels = step
    joint_step(model, images, labels, (2, 8))
    tables = model.norm.tables
    assert tables["2"].weight.grad is not None and tables["8"].weight.grad is not None
    assert tables["4"].weight.grad is None
    assert tables["4"].num_batches_tracked == 0 and tables["8"].num_batches_tracked == 1


def test_width_weights_multiply_a_width_s_gradient(step):
    """The norms of a width get gradients from its loss alone: those scale, others stay; 0 leaves a width out."""
    model, images, labels = step

    def gradients(weights):
        model.zero_grad(set_to_none=True)
        joint_step(model, images, labels, (2, 8), loss="hard", width_weights=weights)
        return {k: model.norm.tables[k].weight.grad.clone() for k in ("2", "8")}

    model.eval()  # running statistics would move between the calls
    plain, weighted, none = gradients(None), gradients({2: 0.25}), gradients({2: 0.0})
    torch.testing.assert_close(weighted["2"], 0.25 * plain["2"])
    torch.testing.assert_close(weighted["8"], plain["8"])
    assert none["2"].abs().sum() == 0 and plain["2"].abs().sum() > 0


def test_label_weight():
    logits, teacher, labels = torch.randn(5, 3), torch.randn(5, 3), torch.randint(0, 3, (5,))
    hard = width_loss("hard", logits, labels, teacher, 0.5)
    soft = width_loss("soft", logits, labels, teacher, 0.5)
    mixed = width_loss("recursive+label", logits, labels, teacher, 0.25)
    torch.testing.assert_close(mixed, 0.25 * hard + 0.75 * soft)
    assert width_loss("recursive", logits, labels, None, 0.5) == hard


def test_label_smoothing():
    logits, teacher, labels = torch.randn(5, 3), torch.randn(5, 3), torch.randint(0, 3, (5,))
    smooth = 0.7 * F.one_hot(labels, 3) + 0.1
    expected = -(smooth * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(width_loss("hard", logits, labels, teacher, 0.5, smoothing=0.3), expected)
    soft = width_loss("soft", logits, labels, teacher, 0.5, smoothing=0.3)
    assert soft == width_loss("soft", logits, labels, teacher, 0.5)  # the teacher's answers are left as they are
    mixed = width_loss("recursive+label", logits, labels, teacher, 0.25, smoothing=0.3)
    torch.testing.assert_close(mixed, 0.25 * expected + 0.75 * soft)


def test_label_smoothing_of_masks_counts_labeled_pixels():
    logits, labels = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    labels[0] = IGNORED
    expected = width_loss("hard", logits[1:], labels[1:], None, 0.5, smoothing=0.3)
    torch.testing.assert_close(width_loss("hard", logits, labels, None, 0.5, smoothing=0.3), expected)


def test_unknown_loss(step):
    model, images, labels = step
    with pytest.raises(RecipeError, match="loss='kl' is not known; choose one of hard, soft"):
        joint_step(model, images, labels, WIDTHS, loss="kl")


def test_error_inside_a_step_leaves_no_shared_state(step):
    model, images, labels = step
    with pytest.raises(IndexError), nullcontext():
        joint_step(model, images, labels + 100, WIDTHS)
    model.zero_grad()
    joint_step(model, images, labels, WIDTHS)
    assert all(m.normalized is None for m in model.modules() if hasattr(m, "normalized"))


def test_choose_widths():
    assert choose_widths(WIDTHS, "all", 1, 0, 7) == [1, 2, 4, 8, 32]
    chosen = [tuple(choose_widths(WIDTHS, "sandwich", 1, 0, step)) for step in range(60)]
    assert all(c[0] == 1 and c[-1] == 32 and len(c) == 3 for c in chosen)
    assert {c[1] for c in chosen} == {2, 4, 8}
    assert chosen == [tuple(choose_widths(WIDTHS, "sandwich", 1, 0, step)) for step in range(60)]
    assert choose_widths((1, 8), "sandwich", 1, 0, 0) == [1, 8]


def test_choose_the_lowest_widths():
    chosen = [tuple(choose_widths(WIDTHS, "lowest", 1, 0, step)) for step in range(60)]
    assert all(c[:2] == (1, 2) and len(c) == 3 for c in chosen)
    assert {c[2] for c in chosen} == {4, 8, 32}
    assert choose_widths((1, 2, 8), "lowest", 1, 0, 0) == [1, 2, 8]


class Wrapped(nn.Module):
    """A network whose output is made by `wrap`."""

    def __init__(self, wrap, outputs=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, outputs))
        self.wrap = wrap

    def forward(self, x, shift=None):
        y = self.body(x)
        return self.wrap(y if shift is None else y + shift)


class ModelOutput(dict):
    """As transformers has it: a dict whose entries are attributes too."""

    def __getattr__(self, name):
        return self[name]


class Named:
    def __init__(self, logits):
        self.logits, self.loss = logits, None


WRAPPINGS = {
    "dict": lambda y: {"hidden": y + 1, "logits": y},
    "model output": lambda y: ModelOutput(loss=None, logits=y),
    "object": Named,
    "tuple": lambda y: (y, [y + 1]),
}


def small(wrap, outputs=3, widths=(2, 8, 32)):
    torch.manual_seed(0)
    x = torch.randn(32, 6)
    return convert(Wrapped(wrap, outputs), widths, x), x


@pytest.mark.parametrize("name", WRAPPINGS)
def test_outputs_with_logits_in_them(name):
    labels = torch.arange(32) % 3
    gradients = {}
    for wrap in (WRAPPINGS[name], lambda y: y):
        model, x = small(wrap)
        found = joint_step(model, x, labels, (2, 8, 32), loss="recursive")
        gradients[wrap] = [p.grad for p in model.parameters() if p.grad is not None]
        assert 0 <= found[8][1] <= 32
    for a, b in zip(*gradients.values(), strict=True):
        assert torch.equal(a, b)


def test_a_loss_function_trains_regression_at_every_width():
    model, x = small(lambda y: {"prediction": y}, 1)
    target = x.sum(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        found = joint_step(
            model, x, target, (2, 8, 32), loss=lambda out, y: F.mse_loss(out["prediction"].squeeze(1), y)
        )
        optimizer.step()
        losses.append({k: float(value) for k, (value, _) in found.items()})
    assert all(losses[-1][k] < 0.5 * losses[0][k] for k in (2, 8, 32))
    assert found[8][1].isnan()  # there are no right answers


def test_a_loss_function_of_classes_counts_answers_and_weighs_widths():
    labels = torch.arange(32) % 3
    model, x = small(lambda y: y)
    other, _ = small(lambda y: y)
    found = joint_step(model, x, labels, (2, 8), loss=F.cross_entropy, width_weights={2: 0.25})
    named = joint_step(other, x, labels, (2, 8), loss="hard", width_weights={2: 0.25})
    assert all(torch.equal(found[k][0], named[k][0]) and found[k][1] == named[k][1] for k in (2, 8))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert a.grad is None or torch.equal(a.grad, b.grad)


def test_inputs_by_name_and_several():
    labels = torch.arange(32) % 3
    for inputs in (lambda x: {"x": x, "shift": x[:, :3]}, lambda x: (x, x[:, :3])):
        model, x = small(lambda y: y)
        with torch.no_grad():
            expected = F.cross_entropy(model(x, x[:, :3]), labels)
        assert joint_step(model, inputs(x), labels, (32,))[32][0] == expected


@pytest.mark.parametrize(
    "wrap, options, message",
    [
        (lambda y: {"boxes": y}, {}, r"loss='wider\+label' needs logits, but the network gives a dict with 'boxes'"),
        (lambda y: {"boxes": y}, {"loss": "recursive"}, "loss='recursive' needs logits"),
        (lambda y: y[:, 0], {}, r"needs logits \(N, classes\), but the network gives \(32,\)"),
        (lambda y: y, {"loss": lambda out, labels: out}, r"returned a tensor \(32, 3\); it must return one number"),
        (lambda y: y, {"loss": lambda out, labels: 0.5}, "returned a float"),
        (lambda y: y, {"loss": F.cross_entropy, "label_smoothing": 0.1}, "label_smoothing is for the named losses"),
    ],
)
def test_losses_that_do_not_fit_the_output(wrap, options, message):
    model, x = small(wrap)
    with pytest.raises(RecipeError, match=message):
        joint_step(model, x, torch.arange(32) % 3, (2, 8), **options)
