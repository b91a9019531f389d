"""Code of which there is no one graph: refused with its line."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_capture import Layer, X, Y, step_of
from torch import Tensor, nn
from torch.autograd import forward_ad

import psg_fx
from psg_fx import CaptureFailed, NotYetSupported, SamplesMixed


def one_sample_differs(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) * 2 if x.shape[0] == 1 else layer(x)


def truth_of_a_size(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) if x.shape[0] - 1 else layer(x) * 2


def truth_of_the_rest(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) * (x[1:].shape[0] and 2.0)


def another_reason_behind_a_branch(layer: Layer, x: Tensor) -> Tensor:
    h = layer(x) if x.shape[0] == 1 else layer(x) + 0
    return h * int(h.sum().item())


def large_batches_differ(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) if x.shape[0] > 4 else layer(x) * 2


def at_least_four(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) / max(int(x.shape[0]), 4)


def loop_over_samples(layer: Layer, x: Tensor) -> Tensor:
    return torch.stack([layer(row) * n for n, row in enumerate(x, 1)])


def gradients_in_a_loop(layer: Layer, x: Tensor) -> Tensor:
    def gradient(row: Tensor) -> Tensor:
        return torch.autograd.grad(layer(row).square().mean(), layer.weight, create_graph=True)[0]

    return torch.stack([layer(row) + n * gradient(row).sum(1) for n, row in enumerate(x)])


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


def as_many_as_the_longest(layer: Layer, x: Tensor) -> Tensor:
    lengths = (x > 0).sum(1)
    longest = lengths.max().item()
    mask = torch.arange(longest)[None] < lengths[:, None]
    return (layer(x)[:, :longest] * mask).sum(1, keepdim=True)  # type: ignore[misc]


def copied_deeply(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) + copy.deepcopy(layer.weight.data).mean()


# torch 2.11 exports it with a number of rows that is not known, so that only its run on one sample says what is wrong
FEWER = "cannot be shown to keep" if torch.__version__ >= "2.12" else "does not run on a batch of one sample"
LONGEST = "read out of a tensor and another one is a size" if torch.__version__ >= "2.12" else "for a constant"
REFUSED: dict[Callable[..., Tensor], tuple[type[Exception], str, str]] = {
    one_sample_differs: (
        NotYetSupported, "the code treats a batch of one sample differently", "if x.shape[0] == 1 else",
    ),
    truth_of_a_size: (NotYetSupported, "the code treats a batch of one sample differently", "if x.shape[0] - 1 else"),
    truth_of_the_rest: (NotYetSupported, "the code treats a batch of one sample differently", "x[1:].shape[0] and 2.0"),
    another_reason_behind_a_branch: (CaptureFailed, "make a number of Python of a value", "h.sum().item()"),
    large_batches_differ: (NotYetSupported, "the code treats a batch of one sample differently", "if x.shape[0] > 4"),
    at_least_four: (NotYetSupported, "follows the batch size in no simple way", "6 at B = 6, 7 at B = 7, 4 at B = 1"),
    loop_over_samples: (NotYetSupported, "the program is another one for another batch size", "for n, row in"),
    gradients_in_a_loop: (NotYetSupported, "the program is another one for another batch size", "layer(row)"),
    fixed_size: (CaptureFailed, "run on 6 samples and not on 7", "layer(x).view(6, 3)"),
    rows_by_mask: (SamplesMixed, "is reduced over them", "x[:, 0] > 0"),
    fewer_rows: (psg_fx.PsgError, FEWER, "in the loss" if torch.__version__ < "2.12" else "layer(x)[x[:, 0] > 0]"),
    branch_on_values: (CaptureFailed, "branches on values of a tensor", "if x.sum() > 0"),
    number_from_values: (SamplesMixed, "is reduced over them", "x.sum().item()"),
    as_many_as_the_longest: (CaptureFailed, LONGEST, ".max()"),
    copied_deeply: (CaptureFailed, "the code reads the memory of a tensor", "copy.deepcopy(layer.weight.data)"),
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

    with pytest.raises(SamplesMixed, match=r"test_refused_captures.py:\d+: centred = out - out.mean\(0\)"):
        step_of(lambda layer, x: layer(x), loss)(X, Y)


def helper(h: Tensor) -> Tensor:
    return h - h.mean(0)


def test_an_op_in_a_helper_has_its_line() -> None:
    with pytest.raises(SamplesMixed, match=r"test_refused_captures.py:\d+: return h - h.mean\(0\)"):
        step_of(lambda layer, x: helper(layer(x)))(X, Y)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # export looks for what it may have been
def test_what_torch_takes_for_a_constant() -> None:
    class Taken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.linearize(self.layer, x)[1](x)

    with pytest.raises(NotYetSupported, match=r"torch\.func\.jvp"):
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
