"""What custom functions read that is no argument, what they are asked for, and what stays of them."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import psg_fx
from external.program import Problem, Program, check, with_loss
from psg_fx import NotYetSupported
from support.autograd_functions import Function, Model, X

FACTOR, TABLE = 2.0, {"factor": torch.tensor(3.0, dtype=torch.float64)}
State = Callable[[Any], object]


def times(g: Tensor) -> Tensor:
    return FACTOR * g


class ByFunction(Function):
    """Its backward is a function that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = backward
        return +x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return ctx.function(g), None


class OfModule(Function):
    """What it computes is said by a module that it is given, which `backward` reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Any) -> Tensor:
        ctx.model = model
        return x @ model.b.weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        scale = 3.0 if ctx.model.training else 4.0
        return scale * ctx.model.scale * g @ ctx.model.b.weight.T, None


class OfTable(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return +x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return TABLE["factor"] * g


class WithoutBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()


class Distance(Function):
    """It has no gradient for its target."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return (x - y).square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        assert not ctx.needs_input_grad[1]
        x, y = ctx.saved_tensors
        return 3 * g * (x - y), None


class AsItComes(Function):
    """Outputs that nobody reads have no gradient, as it is told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> Tensor:
        return sum((7 * t for t in (g, h) if t is not None), torch.tensor(0.0))


class Quadrature(Function):
    """Differentiates a function by what it closes over, which are arguments, too: zuko's `GaussLegendre`."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, *phi: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x, *phi)
        return function(x / 2) * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, *phi = ctx.saved_tensors
        with torch.enable_grad():
            area = ctx.function(x.detach() / 2) * x.detach()
        return None, g * ctx.function(x), *torch.autograd.grad(area, phi, g)


class Held:
    """A function of an object."""

    def __init__(self, value: Tensor) -> None:
        self.values = [value]

    def scaled(self, x: Tensor) -> Tensor:
        return self.values[0].exp() * x


def _closed_over(m: Any, x: Tensor) -> Tensor:
    w = m.a(x)
    found: Tensor = Quadrature.apply(lambda t: w.exp() * t * m.b.bias, m.b(x), w, m.b.bias)
    return found


def _by_a_method(m: Any, x: Tensor) -> Tensor:
    w = m.a(x)
    found: Tensor = m.b(Quadrature.apply(Held(w).scaled, x, w))
    return found


def _by_a_part(m: Any, x: Tensor) -> Tensor:
    w = m.a(x)
    found: Tensor = m.b(Quadrature.apply(functools.partial(torch.mul, w), x, w))
    return found


def _another_than_the_argument(m: Any, x: Tensor) -> Tensor:
    w = m.a(x)
    q = w.exp()
    found: Tensor = Quadrature.apply(lambda t: (w + q) * t, m.b(x), w)
    return found


EXACT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an argument that a function closes over": _closed_over,
    "an argument that an object holds": _by_a_method,
    "an argument of a partial function": _by_a_part,
    "no backward where no gradient comes": lambda m, x: (
        m.b(x) * WithoutBackward.apply(m.a(x).detach()) + WithoutBackward.apply(x)
    ),
    "no gradient for a target": lambda m, x: Distance.apply(m.a(x), x) + Distance.apply(m.b(x), m.b(x).detach()),
    "one of two outputs": lambda m, x: AsItComes.apply(m.a(x))[0] + x * AsItComes.apply(m.b.weight)[1].sum(),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    check(Program(name, lambda: Problem(Model(EXACT[name]).double(), X)), with_loss)


def _eval(model: Any) -> None:
    model.eval()


def _scale(model: Any) -> None:
    model.scale = 5.0


def _weight(model: Any) -> None:
    model.b.weight = nn.Parameter(2 * model.b.weight.detach())


def _data(model: Any) -> None:
    model.b.weight.data = 3 * model.b.weight.data


def _global(model: Any) -> None:
    global FACTOR
    FACTOR += 1


def _in_place(model: Any) -> None:
    TABLE["factor"].add_(1)


def _another(model: Any) -> None:
    TABLE["factor"] = TABLE["factor"] + 1


READ: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[State, ...]]] = {
    "a function": (lambda m, x: ByFunction.apply(m.a(x), times), (_global,)),
    "a function, for a weight": (lambda m, x: F.linear(x, ByFunction.apply(m.a.weight, times)), (_global,)),
    "a module": (lambda m, x: OfModule.apply(m.a(x), m), (_eval, _scale, _weight, _data)),
    "a tensor": (lambda m, x: OfTable.apply(m.a(x)), (_in_place, _another)),
    "a tensor, for a weight": (lambda m, x: F.linear(x, OfTable.apply(m.a.weight)), (_in_place, _another)),
}


@pytest.mark.filterwarnings("ignore:captured for the third time:UserWarning")
@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_read_anew(name: str) -> None:
    function, states = READ[name]
    model = Model(function).double()
    model.scale = 2.0  # type: ignore[assignment]
    step = psg_fx.transform(model, lambda out: out.square().sum(), quantities=psg_fx.Grads(), backend="eager")
    for change in (lambda m: None, *states):
        change(model)
        found = step(X).grads["a.weight"]
        for k, x in enumerate(X.split(1)):
            (truth,) = torch.autograd.grad(model(x).square().sum(), model.a.weight)
            torch.testing.assert_close(found[k], truth)


def test_no_file_has_what_a_function_reads_by_itself(tmp_path: Path) -> None:
    model = Model(READ["a module"][0]).double()
    model.scale = 2.0  # type: ignore[assignment]
    step = psg_fx.transform(model, lambda out: out.square().sum(), backend="eager")
    with pytest.raises(NotYetSupported, match=r"a custom function reads model\.b\.weight by itself"):
        step.export(tmp_path / "step.pt2", X)


class Grown(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[int]) -> Tensor:
        found.append(1)
        return x * len(found)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class Counted(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: SimpleNamespace) -> Tensor:
        calls.n += 1 if isinstance(calls.n, int) else [1]
        return x * (calls.n if isinstance(calls.n, int) else len(calls.n))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class Written(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: SimpleNamespace) -> Tensor:
        return x * state.calls.add_(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class Twice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return (y := 2 * x, y)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        return g + 5 * h


class Sparse(Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(torch.tensor([[1]]), g[None], (4, 4), check_invariants=False)


def _run_again(ctx: Any) -> tuple[Tensor, list[Tensor]]:
    """The block's output, and what it is differentiated by."""
    x, *parameters = ctx.given
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return ctx.block(x), [x, *parameters]


class Checkpointed(Function):
    """Parameters are arguments, and read by the block itself."""

    @staticmethod
    def forward(ctx: Any, block: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.block, ctx.given = block, (x, *parameters)
        return block(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        out, given = _run_again(ctx)
        return None, *torch.autograd.grad(out, given, g, allow_unused=True)


class Strictly(Checkpointed):
    """As it is written where every parameter has a gradient."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        out, given = _run_again(ctx)
        return None, *torch.autograd.grad(out, given, g)


def _closed_over(m: Any, x: Tensor) -> Tensor:
    other = m.b(x)

    class Closed(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return +x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * other

    found: Tensor = Closed.apply(m.a(x))
    return found


STATE = SimpleNamespace(calls=torch.zeros(4))

REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "another tensor than the argument": (_another_than_the_argument, "reads a tensor that is no argument"),
    "a list that grows": (lambda m, x: Grown.apply(m.a(x), []), "changes a list, a dict or an object among"),
    "an object that counts": (lambda m, x: Counted.apply(m.a(x), SimpleNamespace(n=0)), "or an object among its arg"),
    "an object's list": (lambda m, x: Counted.apply(m.a(x), SimpleNamespace(n=[])), "or an object among its arguments"),
    "an object's tensor": (lambda m, x: Written.apply(m.a(x), STATE), "or an object among its arguments"),
    "one tensor twice": (lambda m, x: Twice.apply(m.a(x))[0], "returns one tensor twice"),
    "a sparse gradient": (lambda m, x: x * Sparse.apply(m.a.weight), "its backward returns a sparse gradient"),
    "parameters beside the arguments": (
        lambda m, x: Checkpointed.apply(m.b, m.a(x), *m.b.parameters()), "reads a parameter by a module or a closure",
    ),
    "parameters beside the arguments, all of them used": (
        lambda m, x: Strictly.apply(m.b, m.a(x), *m.b.parameters()), "is not the same tensor there",
    ),
    "an activation beside the arguments": (_closed_over, "reads a tensor that is no argument"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, text = REFUSED[name]
    with pytest.raises(NotYetSupported, match=text):
        with_loss(Problem(Model(function).double(), X))


def _used() -> Any:
    """A model after its steps are gone."""
    model = Model(READ["a module"][0]).double()
    model.scale = 2.0  # type: ignore[assignment]
    step = psg_fx.transform(model, lambda out: out.square().sum(), backend="eager")
    step(X)
    gc.collect()
    step(X[:2])
    return weakref.ref(model)


@pytest.mark.slow
def test_a_step_keeps_no_model_that_a_function_was_given() -> None:
    used = _used()
    gc.unfreeze()  # what was made while nothing looked for garbage
    gc.collect()
    assert used() is None


def test_other_threads_have_their_checkpoints_meanwhile() -> None:
    failed, stop = list[BaseException](), threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                x = X.clone().requires_grad_()
                checkpoint(torch.sin, x, use_reentrant=True).sum().backward()
                assert x.grad is not None
                assert torch.equal(x.grad, X.cos())
            except Exception as error:
                if str(error) != "'custom'":  # torch keeps the notes of its own traces for all threads in one dict
                    failed.append(error)

    other = threading.Thread(target=work)
    other.start()
    psg_fx.transform(Model(lambda m, x: m.a(x)).double(), lambda out: out.square().sum(), backend="eager")(X)
    stop.set()
    other.join()
    assert not failed
