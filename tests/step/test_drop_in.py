"""`transform(model)` without a loss: the model's output, and `grad_sample` after `backward()`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.utils import _pytree as pytree

import psg_fx
from psg_fx import BadArgument, NotYetSupported, zoo
from psg_fx.step.without_loss import _laid_out
from support import oracle
from support.selection import one_in
from support.small import mlp

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {},
    "gpt": {"layers": 1, "width": 16, "heads": 2, "tokens": 6, "vocabulary": 11},
    "encoder": {},
}


def example(name: str) -> zoo.Example:
    try:
        return zoo.example(name, batch=3, dtype=torch.float64, **SMALL.get(name, {}))
    except TypeError:
        return zoo.example(name, batch=3, dtype=torch.float64)


def agree(model: nn.Module, want: dict[str, Tensor], scale: float = 1.0) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert oracle.relative_error(parameter.grad_sample * scale, want[name], 1e-3) < 1e-10, name


@pytest.mark.parametrize("name", SMALL)
def test_grad_sample_is_each_samples_part_of_the_gradient(name: str) -> None:
    ex = example(name)
    dims = ex.batch_dim[0] if isinstance(ex.batch_dim, tuple) else ex.batch_dim
    _, want = oracle.loop_grads(ex.model, ex.loss_fn, ex.inputs, ex.targets, batch_dim=ex.batch_dim)
    step = psg_fx.transform(ex.model, backend="eager", batch_dim=dims)
    output = step(ex.inputs)
    torch.testing.assert_close(output, ex.model(ex.inputs))
    ex.loss_fn(output, ex.targets).backward()
    agree(ex.model, want, scale=3.0)  # the loss is a mean over the batch


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 4)).double()
    return model, torch.randn(5, 2, 4, dtype=torch.float64), torch.randint(4, (5,))


def test_the_same_as_torch_where_torch_has_it() -> None:
    model, x, y = small()
    F.cross_entropy(call_for_per_sample_grads(model, loss_reduction="mean")(x), y).backward()
    want = {name: p.grad_sample for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad_sample = None
    F.cross_entropy(psg_fx.transform(model, loss_reduction="mean", backend="eager")(x), y).backward()
    agree(model, want)


def test_gradients_of_the_inputs_are_the_ordinary_ones() -> None:
    model, x, y = small()
    ours, ordinary = x.clone().requires_grad_(), x.clone().requires_grad_()
    F.cross_entropy(psg_fx.transform(model, backend="eager")(ours), y).backward()
    F.cross_entropy(model(ordinary), y).backward()
    torch.testing.assert_close(ours.grad, ordinary.grad)


INCOMING: dict[str, Any] = {
    "as the output": lambda g: g.clone(memory_format=torch.preserve_format),
    "expanded": lambda g: g[:, :1, :1, :1].expand_as(g),
    "one number": lambda g: g.new_ones(()).expand_as(g),
    "transposed": lambda g: g.transpose(1, 3).contiguous().transpose(1, 3),
    "samples inside": lambda g: g.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "channels last": lambda g: g.contiguous(memory_format=torch.channels_last),
    "a part": lambda g: torch.cat([g, g], 3)[..., : g.shape[3]],
    "every second": lambda g: torch.stack([g, -g], -1).flatten(3)[..., ::2],
}
"""A gradient of the output, as a loss may hand it over in memory."""


@pytest.mark.parametrize(
    ("channels_last", "backend"),
    one_in(4, [(last, backend) for last in (False, True) for backend in ("eager", "aot_eager")]),
)
def test_the_layout_of_an_incoming_gradient(channels_last: bool, backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 4, 2), nn.Flatten(2), nn.Unflatten(2, (3, 5)))
    model, x = model.double(), torch.randn(4, 2, 5, 7, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    step, plain = psg_fx.transform(model, backend=backend), torch.randn(4, 4, 3, 5, dtype=torch.float64)
    for name, lay in INCOMING.items():
        incoming = lay(plain)
        for p in model.parameters():
            p.grad_sample = None
        step(x).backward(incoming)
        for p, parameter in model.named_parameters():
            rows = [torch.autograd.grad(model(x[i : i + 1]), parameter, incoming[i : i + 1])[0] for i in range(4)]
            assert oracle.relative_error(parameter.grad_sample, torch.stack(rows)) < 1e-10, (name, p)


@pytest.mark.parametrize("name", INCOMING)
def test_an_incoming_gradient_is_laid_out_as_the_output(name: str) -> None:
    """The backward is compiled for one memory order: another one would be compiled once more."""
    plain = torch.randn(4, 4, 3, 5)
    incoming = INCOMING[name](plain)
    for like in (torch.empty_like(plain, device="meta"), plain.to("meta").permute(1, 0, 3, 2).contiguous().mT):
        like = like if like.shape == plain.shape else like.transpose(0, 1)
        found = _laid_out(incoming, like, plain.device)
        assert found.stride() == like.stride()
        assert torch.equal(found, incoming)
        assert torch.equal(_laid_out(None, like, plain.device), torch.zeros(4, 4, 3, 5))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(5, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        h = torch.tanh(self.body(x)) * scale
        return {"a": self.a(h), "rest": (self.b(h), scale)}


def test_several_outputs_and_keyword_arguments() -> None:
    torch.manual_seed(0)
    model, x = TwoHeads().double(), torch.randn(4, 4, dtype=torch.float64)

    def loss(out: dict[str, Any]) -> Tensor:
        return out["a"].square().sum() + out["rest"][0].sin().sum()

    _, want = oracle.loop_grads(model, loss, {"x": x, "scale": 0.5})
    out = psg_fx.transform(model, backend="eager")(x, scale=0.5)
    assert out["rest"][1] == 0.5
    loss(out).backward()
    agree(model, want)


def test_an_output_that_the_loss_leaves_out() -> None:
    torch.manual_seed(0)
    model, x = TwoHeads().double(), torch.randn(4, 4, dtype=torch.float64)
    psg_fx.transform(model, backend="eager")(x)["a"].sum().backward()
    assert model.b.weight.grad_sample.abs().max() == 0
    assert model.a.weight.grad_sample.shape == (4, 2, 5)


def test_autocast() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), torch.randn(5, 6)
    step = psg_fx.transform(model, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = step(x)
        plain = model(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, plain)
    output.float().square().sum().backward()
    plain.float().square().sum().backward()
    for p in model.parameters():
        assert p.grad_sample.dtype == torch.float32
        torch.testing.assert_close(p.grad_sample.sum(0), p.grad, rtol=0.05, atol=0.05)


def test_numbers_of_the_batch_among_the_outputs() -> None:
    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            count = x.shape[0]
            return super().forward(x), count, {"more": (2 * count + x.shape[1], count / 2, count // 2, x.numel())}

    model = Counting(4, 3)
    step = psg_fx.transform(model, backend="eager")
    for size in (5, 3, 1):
        x = torch.randn(size, 4)
        _, *numbers = step(x)
        _, *expected = model(x)
        assert numbers == expected
        assert [type(n) for n in pytree.tree_leaves(numbers)] == [type(n) for n in pytree.tree_leaves(expected)]


@pytest.mark.parametrize("order", ["first", "last", "alone"])
def test_detached_outputs_have_no_gradient(order: str) -> None:
    """Also where a value is returned detached and not: what is computed of the detached one leads nowhere."""

    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> list[Tensor]:
            h = super().forward(x)
            return {"first": [h.detach(), h], "last": [h, h.detach(), h], "alone": [2 * h.detach(), h]}[order]

    torch.manual_seed(0)
    model = Twice(nn.Linear(4, 3), nn.Tanh()).double()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    outs, plain = psg_fx.transform(model, backend="eager")(x), model(x)
    assert [out.requires_grad for out in outs] == [out.requires_grad for out in plain]
    sum((k + 1) * out.square().sum() for k, out in enumerate(outs)).backward()
    found, x.grad = x.grad, None
    sum((k + 1) * out.square().sum() for k, out in enumerate(plain)).backward()
    torch.testing.assert_close(found, x.grad)
    for p in model.parameters():
        torch.testing.assert_close(p.grad_sample.sum(0), p.grad)


def test_a_grad_sample_that_was_not_cleared_is_refused() -> None:
    model, x, y = small()
    step = psg_fx.transform(model, backend="eager")
    F.cross_entropy(step(x), y).backward()
    with pytest.raises(BadArgument, match="still has a grad_sample"):
        step(x)
    with torch.no_grad():
        assert not step(x).requires_grad
    for p in model.parameters():
        p.grad_sample = None
    step(x[:2]).sum().backward()
    assert model[0].weight.grad_sample.shape[0] == 2


def test_inputs_that_disagree_on_the_batch_size_are_refused() -> None:
    step = psg_fx.transform(nn.Bilinear(2, 2, 1), backend="eager")
    with pytest.raises(BadArgument, match="disagree on the number of samples"):
        step(torch.randn(3, 2), torch.randn(4, 2))


def test_a_frozen_parameter_gets_none() -> None:
    model, x, y = small()
    model[0].weight.requires_grad_(False)
    F.cross_entropy(psg_fx.transform(model, backend="eager")(x), y).backward()
    assert not hasattr(model[0].weight, "grad_sample")
    assert model[0].bias.grad_sample.shape == (5, 3)


@pytest.mark.inductor
def test_inductor_equals_eager() -> None:
    model, x, y = small()
    _, want = oracle.loop_grads(model, F.cross_entropy, x, y)
    step = psg_fx.transform(model)
    for size in (5, 3):
        for p in model.parameters():
            p.grad_sample = None
        F.cross_entropy(step(x[:size]), y[:size], reduction="sum").backward()
        agree(model, {name: g[:size] for name, g in want.items()})


@pytest.mark.parametrize("repeat", [lambda p, size: p.expand(3 * size, 4), lambda p, size: p.repeat(3 * size, 1)])
def test_rows_of_which_nothing_says_whose_they_are_are_refused(repeat: Any) -> None:
    """They are equal for all samples, so the model may mean any order, and the loss one; without a gradient, it may."""

    class Repeats(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return repeat(self.bias if self.learned else torch.arange(4.0), x.shape[0]), super().forward(x)

    model = Repeats(4, 4)
    model.learned = True
    with pytest.raises(NotYetSupported, match="nothing says which rows are whose"):
        psg_fx.transform(model, backend="eager")(torch.randn(3, 4))
    model.learned = False
    rows, out = psg_fx.transform(model, backend="eager")(torch.randn(3, 4))
    assert rows.shape == (9, 4)
    out.sum().backward()
    assert model.weight.grad_sample.shape == (3, 4, 4)


def test_no_samples() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(15, 4)).double()
    x = torch.zeros(0, 2, 6, dtype=torch.float64, requires_grad=True)
    out = psg_fx.transform(model, backend="eager")(x)
    out.sum().backward()
    assert out.shape == (0, 4)
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert all(p.grad_sample.shape == (0, *p.shape) for p in model.parameters())


def test_two_calls_before_a_backward_are_refused() -> None:
    model, x, _ = small()
    step = psg_fx.transform(model, backend="eager")
    product = step(x) * step(2 * x)
    with pytest.raises(BadArgument, match="still has a grad_sample"):
        product.sum().backward()


def test_a_second_backward_of_one_call_is_refused() -> None:
    model, x, _ = small()
    out = psg_fx.transform(model, backend="eager")(x)
    out.sum().backward(retain_graph=True)
    with pytest.raises(BadArgument, match="still has a grad_sample"):
        out.sum().backward()


class Returns(nn.Module):
    """`function(layer, x)` with a linear layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer, x)


@dataclasses.dataclass(slots=True)
class Record:
    """A class that pytree does not know, and that has no attributes to take apart."""

    h: Tensor


OUTPUTS: dict[str, tuple[Any, str]] = {
    "complex": (lambda layer, x: torch.fft.rfft(layer(x)), "is complex"),
    "of parameters": (lambda layer, x: (layer(x), layer.weight.sum()), "is made of parameters alone"),
    "an unknown class": (lambda layer, x: Record(layer(x)), "returns a Record that holds tensors"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_whose_gradient_would_be_lost_are_refused(name: str) -> None:
    function, text = OUTPUTS[name]
    with pytest.raises(NotYetSupported, match=text):
        psg_fx.transform(Returns(function), backend="eager")(torch.randn(3, 4))


def test_the_gradient_of_an_input_is_there_and_has_none_of_its_own() -> None:
    """`create_graph=True` is no mistake where nothing is differentiated again."""
    torch.manual_seed(0)
    model, x, y = mlp(), torch.randn(3, 4, requires_grad=True), torch.tensor([0, 1, 2])
    made = psg_fx.transform(model, backend="eager")
    (found,) = torch.autograd.grad(F.cross_entropy(made(x), y), x, create_graph=True)
    (want,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    torch.testing.assert_close(found, want)
    with pytest.raises(NotYetSupported, match=r"gradients of gradients[^\0]*derivatives\.md"):
        found.square().sum().backward()


def test_a_penalty_on_the_gradient_of_constant_weights_is_refused() -> None:
    """Nothing that the backward was given wants a gradient; what it saved does (a critic's penalty)."""
    made, x = psg_fx.transform(mlp(), backend="eager"), torch.randn(3, 4, requires_grad=True)
    out = made(x)
    (found,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    loss = out.mean() + (found.norm(dim=1) - 1).square().mean()
    made.zero_grad()
    with pytest.raises(NotYetSupported, match="gradients of gradients"):
        loss.backward()
