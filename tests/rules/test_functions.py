"""Custom autograd functions and checkpoints: their backward counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.utils.checkpoint import checkpoint

import psg_fx
from external.program import Problem, Program, check, drop_in, with_loss
from support import oracle
from support.autograd_functions import (
    ByOwnApply,
    Filled,
    Looked,
    Model,
    OneOfOne,
    Reshaped,
    Reversed,
    Scaled,
    Shifted,
    Sized,
    SumAndProduct,
    Turned,
    Wanted,
    X,
    as_complex,
    as_real,
    cut,
    scaled,
    written,
)
from support.selection import at_once, one_in


def _two(m: Any, x: Tensor) -> Tensor:
    s, p = SumAndProduct.apply(m.a(x), m.b(x), 0.5)
    return s * p


def _parameter_and_data(m: Any, x: Tensor) -> Tensor:
    s, p = SumAndProduct.apply(m.a(x), m.b.bias.expand(x.shape), 0.5)
    return s * p


def _nested(m: Any, x: Tensor) -> Tensor:
    found: Tensor = m.a(checkpoint(lambda v: m.b(v).tanh(), m.a(x), use_reentrant=False))
    return found


def _inferred(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        h = m.a(x).tanh()
    found: Tensor = m.b(x) * h.clone()
    return found


def _by_column(target: Tensor, h: Tensor) -> None:
    target[..., 0] = h[..., 0]
    target[:, 1:3] += 2 * h[:, 1:3]


def _by_parts(target: Tensor, h: Tensor) -> None:
    first, _, last = target.split((2, 1, 2), 1)
    first.add_(h[:, :2])
    for row in last.unbind(1):
        row.copy_(h[:, 0])


def _in_two_steps(target: Tensor, h: Tensor) -> None:
    changed = h.softmax(-1) * 2
    target.transpose(1, 2)[:, 1:].mul_(0.5).add_(changed.transpose(1, 2)[:, 1:])
    torch.mul(target[:, 0], h[:, 0], out=target[:, 0])


def _given_back(m: Any, x: Tensor) -> Tensor:
    """Under `torch.no_grad()` an op that returns its argument itself leaves the argument's gradient alone."""
    h = m.a(x)
    with torch.no_grad():
        same = F.dropout(h.to(x.dtype).cpu().type_as(x), training=False)
        other = torch.atleast_2d(+m.b(x).contiguous()).flatten(2)
    found: Tensor = h * same.sum(-1, keepdim=True) + other
    return found


def _seven(g: Tensor, size: Any) -> Tensor:
    """Another branch for other sizes than that of one sample, which is that of no capture."""
    return 7 * g if size != 2 else g


def _threshold(m: Any, x: Tensor) -> Tensor:
    """Small weights are nought: what they are computed from is not read again."""
    h = m.a(x)
    weight = h.exp().detach()
    weight[weight < 1] = 0
    weight /= weight.sum(-1, keepdim=True) + 1
    return m.b(x) * weight * h


EXACT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "activations": lambda m, x: m.b(Scaled.apply(m.a(x))),
    "by another name": lambda m, x: m.b(scaled(m.a(x))),
    "by a base class": lambda m, x: m.b(super(torch.autograd.Function, Scaled).apply(m.a(x))),
    "by an apply of its own": lambda m, x: m.b(ByOwnApply.apply(m.a(x))),
    "one of a tuple": lambda m, x: m.b(OneOfOne.apply(m.a(x))[0]),
    "gradients that ask what is wanted": lambda m, x: Wanted.apply(m.a(Wanted.apply(x, m.b.weight)), m.a.weight),
    "tensors made of numbers": lambda m, x: m.b(Filled.apply(m.a(x), 3.0)),
    "sizes for shapes alone": lambda m, x: m.b(Sized.apply(m.a(x), lambda t, n: t.view(n, -1).view_as(t), _seven)),
    "a shape and a size as arguments": (
        lambda m, x: m.b(Reshaped.apply(h := m.a(x), h.shape, 5 * h.shape[0]).view(x.shape))
    ),
    "a weight": lambda m, x: F.linear(m.b(x), Scaled.apply(m.a.weight)),
    "a part of a weight": lambda m, x: F.linear(x, Scaled.apply(m.a.weight[:2]).repeat(2, 1)) + m.b(x),
    "two outputs": _two,
    "parameter and data": _parameter_and_data,
    "folded rows": lambda m, x: Scaled.apply(m.a(x.reshape(-1, 4))).view(x.shape),
    "integers": lambda m, x: Looked.apply(m.a(x), m.b(x).detach().argsort(-1)),
    "the input itself": lambda m, x: m.b(Reversed.apply(m.a(x))),
    "an intermediate value that it writes into": lambda m, x: (
        Shifted.apply(m.a(x)) * m.b(Shifted.apply(m.b(x)[..., :4]))
    ),
    "twice": lambda m, x: Scaled.apply(m.b(Scaled.apply(m.a(x)))),
    "under no_grad": lambda m, x: m.b(x) + Scaled.apply(m.a(x).detach()),
    "checkpointed": lambda m, x: checkpoint(lambda v: Scaled.apply(m.a(v)), m.b(x), use_reentrant=False),  # type: ignore[no-any-return]
    "nested checkpoints": lambda m, x: checkpoint(_nested, m, x, use_reentrant=False),  # type: ignore[no-any-return]
    "inference mode": _inferred,
    "complex activations": lambda m, x: m.b(as_real(Turned.apply(as_complex(m.a(x))))),
    "a complex weight": lambda m, x: as_real(as_complex(m.b(x)) @ Turned.apply(as_complex(m.a.weight)[:2])),
    "data": lambda m, x: m.b(x) * m.a(x).data,
    "written into .data of zeros": written(lambda t, h: t.data.copy_(h), grad=True),
    "written into .data and read under no_grad": written(lambda t, h: [d := t.data, d.copy_(h), d.div_(1 + d * d)]),
    "columns written under no_grad": written(_by_column),
    "parts written under no_grad": written(_by_parts),
    "views written under no_grad": written(_in_two_steps),
    "given back under no_grad": _given_back,
    "moved to where it is": lambda m, x: m.a.to(x.dtype)(m.b(x).tanh()),
    "written where it is detached": _threshold,
    "written in parts where it is detached": lambda m, x: m.b(x) * cut(m.a(x).tanh().detach()),
    "less itself without a gradient": lambda m, x: [h := m.a(x), h.sub_(h.detach()), h + m.b(x)][2],
    "written through .data": lambda m, x: m.b(x) * m.a(x).tanh().data.clamp_(min=0.0),
    "detached in place before": lambda m, x: m.b(x * m.a(x).detach().detach_()),
}

if torch.__version__ >= "2.12":
    EXACT["by keyword"] = lambda m, x: SumAndProduct.apply(m.a(x), scale=0.5, y=m.b(x))[1]


@pytest.mark.parametrize("names", at_once([list(EXACT)[k::4] for k in range(4)], EXACT))
def test_exact(names: tuple[str, ...]) -> None:
    def several(m: Any, x: Tensor) -> Tensor:
        return torch.cat([EXACT[name](m, x).flatten(1) for name in names], 1)

    check(Program("-".join(names), lambda: Problem(Model(several).double(), X)), with_loss)


@pytest.mark.parametrize("name", one_in(4, EXACT))
def test_exact_without_a_loss(name: str) -> None:
    check(Program(name, lambda: Problem(Model(EXACT[name]).double(), X)), drop_in)


class Mixed(torch.autograd.Function):
    """A product by the helpers for autocast: its backward is computed as its forward was."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    @custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, -2).T @ x.flatten(0, -2)


def test_under_autocast() -> None:
    """To the last bit but for a sum's order: products of bfloat16 that are not rounded there differ by a hundredth."""
    model = Model(lambda m, x: Mixed.apply(m.b(x), m.a.weight).tanh())
    step = psg_fx.transform(model, lambda out: out.float().square().mean(), quantities=psg_fx.Grads(), backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        found = step(X.float()).grads
        for k, x in enumerate(X.float().split(1)):
            loss = model(x).float().square().mean()
            truth = torch.autograd.grad(loss, [model.a.weight, model.b.weight, model.b.bias])
            for name, expected in zip(("a.weight", "b.weight", "b.bias"), truth, strict=True):
                torch.testing.assert_close(found[name][k], expected, rtol=1e-5, atol=1e-7)


def test_reentrant_checkpoint() -> None:
    """`autograd.grad`, which the loop needs, does not pass through one; the same block without it is the truth."""

    def model(wrapped: bool) -> nn.Module:
        torch.manual_seed(0)

        def forward(m: Any, x: Tensor) -> Tensor:
            h = m.b(x)
            inner: Any = lambda v: torch.tanh(m.a(v))  # noqa: E731
            found: Tensor = checkpoint(inner, h, use_reentrant=True) if wrapped else inner(h)
            return found

        return Model(forward).double()

    truth = oracle.loop_grads(model(False), Problem(model(False), X).loss, X)[1]
    assert oracle.worst_error(with_loss(Problem(model(True), X)), truth) < 1e-12


def test_reentrant_checkpoint_over_inputs_without_a_gradient() -> None:
    """Its parameters have theirs, which torch leaves out; the first answer is that of the block, too."""
    model = Model(lambda m, x: m.a(checkpoint(m.b, x, use_reentrant=True).tanh()))
    plain = Model(lambda m, x: m.a(m.b(x).tanh()))
    plain.load_state_dict(model.state_dict())
    truth = oracle.loop_grads(plain.double(), torch.sum, X)[1]
    found = psg_fx.transform(model.double(), torch.sum, quantities=psg_fx.Grads(), backend="eager")(X).grads
    assert oracle.worst_error(found, truth) < 1e-12


def test_captures_of_one_model_do_not_meet() -> None:
    """Each call of a function is an op of its own, also when the model is captured again."""
    step = psg_fx.transform(Model(EXACT["twice"]), lambda out: out.sum(), backend="eager")
    first = step(X.float()).grads["a.weight"]
    step(X.float()[:, :3])
    assert torch.equal(step(X.float()).grads["a.weight"], first)


def test_functions_are_alike_in_graphs_for_each_batch_size() -> None:
    """Where the code reads the batch size as a number, captures at several sizes are compared."""

    def forward(m: Any, x: Tensor) -> Tensor:
        found: Tensor = m.b(Filled.apply(scaled(m.a(x)), 3.0)) / float(len(x))
        return found

    with pytest.warns(UserWarning, match="one graph for each batch size"):
        check(Program("sized", lambda: Problem(Model(forward).double(), X)), with_loss)


class Around:
    """What a backward reads, in the ways that code does."""

    gain, table = 1.0, {"gain": 1.0}

    @staticmethod
    def helper(g: Tensor) -> Tensor:
        return g * Around.table["gain"]

    def __call__(self, g: Tensor) -> Tensor:
        return g * self.gain


AROUND = Around()
BACKWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "a static method": lambda g: Around.helper(g),
    "an object that is called": lambda g: AROUND(g),
}


@pytest.mark.parametrize("name", BACKWARDS)
@pytest.mark.parametrize("operator", [False, True], ids=["a function", "an operator"])
def test_what_a_backward_reads_is_followed(name: str, operator: bool) -> None:
    made = _operator(BACKWARDS[name]) if operator else _with_backward(BACKWARDS[name])
    step = psg_fx.transform(Model(lambda m, x: made(m.a(x))).double(), lambda out: out.sum(), backend="eager")
    first = step(X).grads["a.weight"]
    Around.gain = Around.table["gain"] = 3.0
    try:
        torch.testing.assert_close(step(X).grads["a.weight"], 3 * first)
        step(X)
        assert len(step.captures) == 2
    finally:
        Around.gain = Around.table["gain"] = 1.0


def _with_backward(backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return backward(g)

    found: Callable[[Tensor], Tensor] = Sine.apply
    return found


def _operator(backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @torch.library.custom_op(f"tests_of_functions::sine_{next(NUMBERS)}", mutates_args=())
    def sine(x: Tensor) -> Tensor:
        return x.sin()

    sine.register_fake(torch.empty_like)
    sine.register_autograd(lambda ctx, g: backward(g))
    return psg_fx.trust(sine)


NUMBERS, SIZED = itertools.count(), "depends on the batch size|computes with the batch size"
OF_THE_BATCH: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "filled": (
        lambda g: g * torch.full((1,), g.shape[0], dtype=g.dtype),
        SIZED,
    ),
    "chosen": (lambda g: torch.where(g > 0, g, g.shape[0]), SIZED),
    "compared": (lambda g: g * (torch.arange(4) < g.shape[0]), SIZED),
    "a loop": (lambda g: torch.stack([2 * row for row in g]), "fixes the batch size"),
    "a tensor of it": (lambda g: g * torch.tensor(list(g.shape)).sum(), "fixes the batch size"),
}


@pytest.mark.parametrize("name", OF_THE_BATCH)
@pytest.mark.parametrize("operator", [False, True], ids=["a function", "an operator"])
def test_a_backward_that_reads_the_batch_size_is_refused(name: str, operator: bool) -> None:
    backward, text = OF_THE_BATCH[name]
    made = _operator(backward) if operator else _with_backward(backward)
    step = psg_fx.transform(Model(lambda m, x: made(m.a(x))).double(), lambda out: out.sum(), backend="eager")
    with pytest.raises(psg_fx.PsgError, match=text):
        step(X)


def test_attributes_of_a_tensor_inside_are_refused() -> None:
    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.scale = getattr(weight, "scale", 1.0)
            return x * ctx.scale

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
            return g * ctx.scale, None

    model: Any = Model(lambda m, x: Weighted.apply(m.a(x), m.b.weight)).double()
    step = psg_fx.transform(model, lambda out: out.sum(), backend="eager")
    before = step(X).grads["a.weight"]
    model.b.weight.scale = 3.0
    with pytest.raises(psg_fx.NotYetSupported, match="the custom function Weighted reads scale of a tensor"):
        step(X)
    del model.b.weight.scale
    torch.testing.assert_close(step(X).grads["a.weight"], before)
