"""Code that ties itself to the batch size: one graph for each size where that is exact, else refused with its line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import psg_fx
from psg_fx import CaptureFailed, ClippedSum, Grads, Norms, NotYetSupported, SamplesMixed
from support import oracle
from support.selection import one_in

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(6, 4, dtype=torch.float64, generator=GENERATOR), torch.tensor([0, 2, 1, 1, 0, 2])
Layer = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """`function(layer, x)` with a linear layer 4 -> 3."""

    def __init__(self, function: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 3).double(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer, x)


def plain_number(layer: Layer, x: Tensor) -> Tensor:
    size = int(x.shape[0])
    return layer(x).reshape(size, 3)


def numpy_size(layer: Layer, x: Tensor) -> Tensor:
    return layer(x.reshape(int(np.prod(x.shape)) // 4, 4))


def divided(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) / int(x.shape[0]) + math.floor(x.shape[0]) / int(x.shape[0])


def harmless_branch(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) if x.shape[0] % 7 != 3 else layer(x).contiguous()


def copied_for_several(layer: Layer, x: Tensor) -> Tensor:
    """A reshape that is a view for one sample alone, and a copy that is none there."""
    rows = layer(torch.stack([x, x.sin()], 1)).transpose(0, 1).reshape(2 * len(x), 3)
    rows = rows.tanh().view(2, len(x), 3).permute(1, 0, 2).contiguous().view(len(x), 2, 3).sum(1)
    return rows + rows[:, 1].reshape(len(x), -1)


def of_a_root(layer: Layer, x: Tensor) -> Tensor:
    """Numbers that follow the batch size in any way, and are no sizes."""
    share = torch.tensor([math.log(len(x) + 1.0), 1.0], dtype=x.dtype)
    return layer(x) * math.exp(1 / len(x)) / math.sqrt(len(x)) + share.sum()


EXACT = [plain_number, numpy_size, divided, harmless_branch, copied_for_several, of_a_root]


def step_of(function: Callable[[Layer, Tensor], Tensor], loss: Any = F.cross_entropy) -> Any:
    return psg_fx.transform(Model(function), loss, backend="eager")


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("function", one_in(3, EXACT))
def test_one_graph_for_each_size(function: Callable[[Layer, Tensor], Tensor]) -> None:
    step = step_of(function)
    for size in (6, 4, 1, 6):
        x, y = X[:size], Y[:size]
        losses, grads = oracle.loop_grads(step.model, F.cross_entropy, x, y)
        out = step(x, y)
        assert oracle.relative_error(out.losses, losses) < 1e-12
        assert oracle.worst_error(out.grads, grads) < 1e-12
    assert len(step.captures) == 3


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", one_in(4, [f.__name__ for f in EXACT]))
def test_no_samples(name: str) -> None:
    """Rows are empty and sums are zero, whatever the code would divide by."""
    function: Callable[[Layer, Tensor], Tensor] = globals()[name]
    asked = [Grads(), Norms(), ClippedSum(1.0)]
    loss = lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(out)  # noqa: E731
    step = psg_fx.transform(Model(function), loss, quantities=asked, backend="eager")
    for _ in range(2):
        out = step(X[:0], Y[:0])
        assert out.losses.shape == out.norms.shape == (0,)
        for key, p in step.model.named_parameters():
            assert out.grads[key].shape == (0, *p.shape)
            assert torch.equal(out.clipped_sum[key], torch.zeros_like(p))
    _, grads = oracle.loop_grads(step.model, F.cross_entropy, X, Y)
    assert oracle.worst_error(step(X, Y).grads, grads) < 1e-12
    without = psg_fx.transform(Model(function), backend="eager")
    if function in (divided, of_a_root):  # the model returns what it is of the whole batch
        with pytest.raises(SamplesMixed, match="divide in the loss"):
            without(X[:0])
        return
    without(X[:0]).sum().backward()
    assert without.model.layer.weight.grad_sample.shape == (0, 3, 4)


def test_distances_of_all_rows() -> None:
    """Torch computes them by products from 26 rows on."""
    table = torch.randn(5, 3, dtype=torch.float64, generator=GENERATOR)
    step = step_of(lambda layer, x: torch.cdist(layer(x.repeat_interleave(6, 0)), table).view(-1, 6, 5).sum(1))
    _, grads = oracle.loop_grads(step.model, F.cross_entropy, X, Y)
    assert oracle.worst_error(step(X, Y).grads, grads) < 1e-12
    assert step(X[:2], Y[:2]).losses.shape == (2,)
    assert len(step.captures) == 1


def test_it_is_said_once_and_kept_in_the_plan() -> None:
    step = step_of(plain_number)
    with pytest.warns(UserWarning, match=r"one graph for each batch size: .* \(test_capture.py:\d+: size = int\(x.sh"):
        step(X, Y)
    step(X[:4], Y[:4])  # warnings are errors here
    assert "one graph for each batch size" in step.explain()


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
def test_buffers_are_written_by_the_number_of_the_batch() -> None:
    """And losses by that of one sample."""

    def forward(layer: Any, x: Tensor) -> Tensor:
        layer.total.mul_(1 + math.log(len(x)))
        found: Tensor = layer(x) * math.sqrt(len(x))
        return found

    step = step_of(forward)
    step.model.layer.register_buffer("total", torch.ones((), dtype=torch.float64))
    out = step(X[:4], Y[:4])
    assert oracle.worst_error(out.grads, oracle.loop_grads(step.model, F.cross_entropy, X[:4], Y[:4])[1]) < 1e-12
    assert abs(step.model.layer.total.item() - (1 + math.log(4))) < 1e-14


def test_labels_of_eight_bits() -> None:
    losses = (F.cross_entropy, lambda out, y: F.nll_loss(out.log_softmax(-1), y, ignore_index=1))
    for loss in losses:
        step = step_of(lambda layer, x: layer(x), loss)
        truth = oracle.loop_grads(step.model, loss, X, Y)[1]
        assert oracle.worst_error(step(X, Y.to(torch.uint8)).grads, truth) < 1e-12


def test_without_a_loss() -> None:
    model = Model(plain_number)
    _, grads = oracle.loop_grads(model, lambda out: out.sin().sum(), X)
    step = psg_fx.transform(model, backend="eager")
    with pytest.warns(UserWarning, match="one graph for each batch size"):
        step(X).sin().sum().backward()
    assert oracle.worst_error({n: p.grad_sample for n, p in model.named_parameters()}, grads) < 1e-12


def repeated_for_one(layer: Layer, x: Tensor) -> Tensor:
    noise = x[:, :1]
    if noise.shape[0] == 1:
        noise = noise.expand(x.shape[0], -1)
    return layer(x) * noise


def checked_beside_a_number(layer: Layer, x: Tensor) -> Tensor:
    y = layer(x)
    if int(x.shape[0]) != y.shape[0] or (y.shape[0] == 1 and x.shape[0] > 1):
        raise ValueError("other samples")
    return y


def said_of_large_ones(layer: Layer, x: Tensor) -> Tensor:
    assert x.shape[0] > 4 or x.ndim == 2
    return layer(x)


@pytest.mark.parametrize("function", [repeated_for_one, checked_beside_a_number, said_of_large_ones])
def test_another_branch_for_one_sample_that_computes_the_same(function: Callable[[Layer, Tensor], Tensor]) -> None:
    model = Model(function)
    losses, grads = oracle.loop_grads(model, lambda out: out.sin().sum(), X)
    step = psg_fx.transform(model, lambda out: out.sin().sum(), backend="eager")
    with pytest.warns(UserWarning, match="one graph for each batch size"):
        out = step(X)
    assert oracle.worst_error(out.grads, grads) < 1e-12
    torch.testing.assert_close(out.losses, losses)


def one_sample_differs(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) * 2 if x.shape[0] == 1 else layer(x)


def truth_of_a_size(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) if x.shape[0] - 1 else layer(x) * 2


def truth_of_the_rest(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) * (x[1:].shape[0] and 2.0)


def large_batches_differ(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) if x.shape[0] > 4 else layer(x) * 2


def at_least_four(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) / max(int(x.shape[0]), 4)


def loop_over_samples(layer: Layer, x: Tensor) -> Tensor:
    return torch.stack([layer(row) for row in x])


def fixed_size(layer: Layer, x: Tensor) -> Tensor:
    return layer(x).view(6, 3)


def rows_by_mask(layer: Layer, x: Tensor) -> Tensor:
    return layer(x)[x[:, 0] > 0].sum() + 0 * layer(x)


def fewer_rows(layer: Layer, x: Tensor) -> Tensor:
    return layer(x)[x[:, 0] > 0]


def branch_on_values(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) if x.sum() > 0 else -layer(x)


def number_from_values(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) * x.sum().item()


def other_halves(layer: Layer, x: Tensor) -> Tensor:
    half = int(x.shape[0]) // 2
    return layer(torch.cat([x[half:], x[:half]]))


def two_graphs(layer: Layer, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda v: layer(v), lambda v: -layer(v), (x,))


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


def function_under_vmap(layer: Layer, x: Tensor) -> Tensor:
    return torch.func.vmap(Doubled.apply)(layer(x))


def without_shapes(layer: Layer, x: Tensor) -> Tensor:
    scale, zero = torch.ones(1, dtype=x.dtype), torch.zeros(1, dtype=x.dtype)
    return layer(torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero, -9, 9, 1.0))


def written_parameter(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) + F.embedding((x[:, :3] > 0).long(), layer.weight, max_norm=1.0).sum(2)


def least_squares(layer: Layer, x: Tensor) -> Tensor:
    return torch.linalg.lstsq(layer.weight, layer(x).T).solution.T


def cut_off(layer: Layer, x: Tensor) -> Tensor:
    return layer(x).detach() + x.sum(1, keepdim=True)


# torch 2.11 exports it with a number of rows that is not known, so that only its run on one sample says what is wrong
FEWER = "s on values of a tensor" if torch.__version__ >= "2.12" else "does not run on a batch of one sample"
REFUSED: dict[Callable[..., Tensor], tuple[type[Exception], str, str]] = {
    one_sample_differs: (
        NotYetSupported, "the code treats a batch of one sample differently", "if x.shape[0] == 1 else",
    ),
    truth_of_a_size: (NotYetSupported, "the code treats a batch of one sample differently", "if x.shape[0] - 1 else"),
    truth_of_the_rest: (NotYetSupported, "the code treats a batch of one sample differently", "x[1:].shape[0] and 2.0"),
    large_batches_differ: (NotYetSupported, "the code treats a batch of one sample differently", "if x.shape[0] > 4"),
    at_least_four: (NotYetSupported, "follows the batch size in no simple way", "6 at B = 6, 7 at B = 7, 4 at B = 1"),
    loop_over_samples: (NotYetSupported, "the program is another one for another batch size", "for row in x"),
    fixed_size: (CaptureFailed, "run on 6 samples and not on 7", "layer(x).view(6, 3)"),
    rows_by_mask: (SamplesMixed, "is reduced over them", "x[:, 0] > 0"),
    fewer_rows: (psg_fx.PsgError, FEWER, ""),
    branch_on_values: (CaptureFailed, "branches on values of a tensor", "if x.sum() > 0"),
    number_from_values: (SamplesMixed, "it reads one number out of the samples", "x.sum().item()"),
    two_graphs: (CaptureFailed, "hold graphs of their own", "torch.cond(x.sum() > 0"),
    function_under_vmap: (CaptureFailed, "a transformation of torch.func (vmap, grad, jvp)", "torch.func.vmap("),
    without_shapes: (NotYetSupported, "is known to torch by its kernels alone", "_learnable_per_tensor_affine(x,"),
    written_parameter: (NotYetSupported, "writes into model.layer.weight", "renorm_"),
    least_squares: (CaptureFailed, "goes by the values of a tensor", "torch.linalg.lstsq(layer.weight"),
    cut_off: (psg_fx.BadArgument, "depends on none of the model's parameters", "detached"),
    other_halves: (NotYetSupported, "follows the batch size in no simple way", "x[half:]"),
}  # fmt: skip


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_refused_with_the_users_line(function: Callable[[Layer, Tensor], Tensor]) -> None:
    kind, what, line = REFUSED[function]
    with pytest.raises(kind, match=re.escape(what)) as caught:
        step_of(function)(X, Y)
    assert line in str(caught.value)


def test_an_op_of_the_loss_has_its_line() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        centred = out - out.mean(0)
        return F.cross_entropy(centred, y)

    with pytest.raises(SamplesMixed, match=r"test_capture.py:\d+: centred = out - out.mean\(0\)"):
        step_of(lambda layer, x: layer(x), loss)(X, Y)


def helper(h: Tensor) -> Tensor:
    return h - h.mean(0)


def test_an_op_in_a_helper_has_its_line() -> None:
    with pytest.raises(SamplesMixed, match=r"test_capture.py:\d+: return h - h.mean\(0\)"):
        step_of(lambda layer, x: helper(layer(x)))(X, Y)


def test_what_only_a_cast_looks_at_is_not_computed() -> None:
    """Export writes what it knows of the argument of `x.to` behind it: an op without a result, which is always run."""
    step = step_of(lambda layer, x: layer(x).to(x.dtype) + 0 * layer(x).sin().to(x.dtype).shape[1])
    step(X, Y)
    targets = [str(node.target) for node in step.graphs["captured"].graph.nodes]
    assert not [name for name in targets if "assert" in name or "sin" in name]


class Folded(nn.Module):
    """Elements of a tensor of 2 B rows, counted inside of a composite op, of which B is found again as a quotient."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs, self.norm = nn.Bilinear(2, 2, 1, bias=False), nn.GroupNorm(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, 0]
        rows = self.pairs(x, x.sin())
        rows = torch.cat([rows, rows * 2], 1).repeat_interleave(2, 0).reshape(2 * x.shape[0], 1, 2)
        weight = self.norm.weight * (self.norm.weight.detach().abs() > 0.2)
        return F.group_norm(rows, 1, weight, self.norm.bias).reshape(x.shape[0], 2, 1, 2)


def test_sizes_are_written_by_those_of_inputs() -> None:
    model = Folded().double()

    def loss(out: Tensor) -> Tensor:
        return out.square().sum()

    step = psg_fx.transform(model, loss, backend="eager")
    for size in (5, 1):
        x = X[:size].unflatten(1, (2, 2))
        _, want = oracle.loop_grads(model, loss, x)
        assert oracle.worst_error(step(x).grads, want) < 1e-12


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # export looks for what it may have been
@pytest.mark.parametrize(
    ("program", "kind", "fix"),
    [
        (lambda m, x: torch.func.linearize(m, x)[1](x), NotYetSupported, r"torch\.func\.jvp"),
        (lambda m, x: torch.func.vmap(m, out_dims=1)(x).mT, CaptureFailed, "movedim"),
    ],
)
def test_what_torch_takes_for_a_constant(
    program: Callable[[nn.Module, Tensor], Tensor], kind: type[Exception], fix: str
) -> None:
    class Taken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return program(self.layer, x)

    with pytest.raises(kind, match=fix):
        psg_fx.transform(Taken(), lambda o: o.square().mean(), backend="eager")(torch.randn(3, 4))


def test_forward_mode_by_hand_is_refused_and_leaves_no_level_open() -> None:
    class Dual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            with forward_ad.dual_level():
                value, tangent = forward_ad.unpack_dual(self.layer(forward_ad.make_dual(x, torch.ones_like(x))).tanh())
                return value + tangent

    model, x = Dual(), torch.randn(3, 4)
    with pytest.raises(NotYetSupported, match=r"forward-mode AD(?s:.*)torch\.func\.jvp"):
        psg_fx.transform(model, lambda o: o.square().mean(), backend="eager")(x)
    model(x)
    torch.func.jvp(torch.sin, (x,), (x,))
