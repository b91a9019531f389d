"""Functions that run as written here while the model is captured, because torch's own do not become a graph of samples.

`F.linear_cross_entropy` has an op that cuts the batch into pieces.  Transformer layers look into a mask whether it is
causal, a hint that changes no value.  `torch.cdist` goes by the number of rows.  `F.dropout` that drops nothing returns
its input.  `F.gaussian_nll_loss` and distributions look at values to check them.  opt_einsum, where it is installed,
orders a product of several tensors by their sizes, the batch size among them.  Generators of random numbers are refused
but for the default one.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from psg_fx.errors import NotYetSupported
from psg_fx.op_table import at_capture, known
from psg_fx.ops.ctc import ctc
from psg_fx.ops.experts import grouped_mm
from psg_fx.program.code import users_line
from psg_fx.torch_private.patching import code_replaced_here, patched_here

from . import draws, under_vmap
from .bags import bags_of_rows
from .contractions import orders_of_contractions
from .flexible import attention_as_formula
from .losses import adaptive_log_softmax
from .packed import Padding, packed_as_padded


class _Rewritten(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if kwargs and kwargs.get("generator") is not None:
            kwargs = _with_the_default_generator(func, kwargs)
        return (known(func).at_capture or func)(*args, **(kwargs or {}))


def _with_the_default_generator(func: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if kwargs["generator"] is not torch.default_generator:
        raise NotYetSupported(
            f"{getattr(func, '__name__', func)} draws from a generator of its own",
            where=users_line(sys._getframe(2)),
            why="a graph draws from the default generator, and no call would move this one on",
            fix="leave generator out (torch.manual_seed sets the default one), or draw before the step and pass the "
            "numbers as an input",
        )  # fmt: skip
    return {name: value for name, value in kwargs.items() if name != "generator"}


def linear_cross_entropy(*args: Any, options: Any = None, **named: Any) -> Tensor:
    """Without the options, which say in how many pieces it is computed."""
    return F.linear_cross_entropy(*args, **named)


if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
    at_capture(F.linear_cross_entropy)(linear_cross_entropy)


@at_capture(torch.where)
def where(condition: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of a condition in bytes, too, which torch's op takes and its graphs do not."""
    return torch.where(condition.bool() if condition.dtype is torch.uint8 else condition, *args, **kwargs)


@at_capture(Tensor.where)
def where_of(input: Tensor, condition: Tensor, other: Any) -> Tensor:
    """The same."""
    found: Tensor = where(condition, input, other)
    return found


@at_capture(torch.equal, Tensor.equal)
def equal(input: Tensor, other: Tensor) -> bool:
    """Tensors with other numbers of dims, or fixed sizes, are never equal, whatever they hold."""
    pairs = zip(input.shape, other.shape, strict=False)
    if input.dim() != other.dim() or any(type(a) is type(b) is int and a != b for a, b in pairs):
        return False
    return torch.equal(input, other)


@at_capture(F.cross_entropy)
def cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Of labels of any whole numbers that torch takes."""
    return under_vmap.cross_entropy(input, _labels(target), *args, **kwargs)


@at_capture(F.nll_loss)
def nll_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The same."""
    return under_vmap.nll_loss(input, _labels(target), *args, **kwargs)


def _labels(target: Tensor) -> Tensor:
    """Labels of 8 bits as those that torch's shapes are known for.  Of other integers it refuses values alone."""
    if target.dtype in (torch.int8, torch.int16, torch.int32):
        message = f"expected labels of int64 or uint8, got {target.dtype}"
        raise TypeError(message)
    return target.long() if target.dtype is torch.uint8 else target


@at_capture(F.gaussian_nll_loss)
def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """(log v + (x - t)² / v) / 2 (full: + log(2π) / 2) for v = max(var, ε), whose gradient is that of var everywhere.

    Without the check that no variance is negative: it looks at values.
    """
    if not isinstance(var, Tensor):
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)
    var = var.unsqueeze(-1) if var.dim() == input.dim() - 1 else var
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (var.log() + (input - target) ** 2 / var) + (0.5 * math.log(2 * math.pi) if full else 0.0)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


@at_capture(torch.take_along_dim, Tensor.take_along_dim)
def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """y[i.., j, k..] = x[i.., ids[i.., j, k..], k..] along dim, both broadcast in the others.  Torch's own reads the
    batch size as a number.
    """
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    dim = dim % max(input.dim(), 1)
    both = torch.broadcast_shapes(*([*t.shape[:dim], 1, *t.shape[dim + 1 :]] for t in (input, indices)))

    def wide(t: Tensor) -> Tensor:
        return t.expand([*both[:dim], t.shape[dim], *both[dim + 1 :]])

    return wide(input).gather(dim, wide(indices))


@at_capture(F.dropout)
def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """The input itself where nothing is dropped: under `torch.no_grad()` an op of it would have no gradient.  Where all
    is, nothing is drawn, as in torch.
    """
    if training and p == 1:
        return input.mul_(0.0) if inplace else input * 0.0
    return F.dropout(input, p, training, inplace) if training and p else input


@at_capture(torch.dropout)
def plain_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """The same."""
    return dropout(input, p, train)


@at_capture(torch.cdist)
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """Distances one by one, unless products are asked for: torch's own takes products from 26 rows on."""
    if compute_mode is None or compute_mode == "use_mm_for_euclid_dist_if_necessary":
        compute_mode = "donot_use_mm_for_euclid_dist"
    return torch.cdist(x1, x2, p, compute_mode)


@at_capture(torch.diff, Tensor.diff)
def diff(
    input: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    """y[i] = x[i + 1] - x[i] along dim, n times, of x between `prepend` and `append`."""
    parts = [t for t in (prepend, input, append) if t is not None]
    x = torch.cat(parts, dim) if len(parts) > 1 else input
    for _ in range(min(n, x.shape[dim])):
        later, earlier = x.narrow(dim, 1, x.shape[dim] - 1), x.narrow(dim, 0, x.shape[dim] - 1)
        x = later ^ earlier if x.dtype is torch.bool else later - earlier
    return x if n else x.clone()


@at_capture(Tensor.fill_diagonal_)
def fill_diagonal_(input: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """x[i, .., i] = value; with `wrap` the diagonal of a tall matrix begins anew below its end.  Torch's own goes by
    where x lies in memory.
    """
    first, *rest = (
        torch.arange(size, device=input.device).view(-1, *[1] * (input.dim() - 1 - d))
        for d, size in enumerate(input.shape)
    )
    first = first % (input.shape[1] + 1) if wrap and input.dim() == 2 else first
    return input.masked_fill_(functools.reduce(torch.logical_and, (first == other for other in rest)), fill_value)


@at_capture(F.instance_norm)
def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Running statistics in training as writes of their own: m' = (1 - μ) m + μ mean_b mean(x[b,c]), and v' of unbiased
    variances.  Torch's op writes them unseen, and they do not enter the output.
    """
    if running_mean is None or running_var is None:
        return F.instance_norm(input, None, None, weight, bias, use_input_stats, momentum, eps)
    if not use_input_stats:  # then it is batch norm
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    with torch.no_grad():
        rows = input.detach().flatten(2)
        for running, new in ((running_mean, rows.mean(2)), (running_var, rows.var(2))):
            running.copy_((1 - momentum) * running + momentum * new.mean(0))
    return F.instance_norm(input, None, None, weight, bias, True, momentum, eps)


@at_capture(F.ctc_loss)
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """L[b] = -log p(target[b]), its mean that of L[b] / max(1, length of target b); an op that knows the samples.
    Targets of all samples in one dim are padded later.
    """
    given = (log_probs, targets, input_lengths, target_lengths)
    if log_probs.dim() != 3:
        return F.ctc_loss(*given, blank, reduction, zero_infinity)
    lengths = [_lengths(v, log_probs) for v in (input_lengths, target_lengths)]
    losses: Tensor = ctc(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction == "mean":
        return (losses / lengths[1].clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses


def _lengths(given: Any, log_probs: Tensor) -> Tensor:
    """Lengths `[B]`, where they are given as numbers: the same for all samples."""
    if isinstance(given, Tensor):
        return given
    if len(set(given)) > 1:
        raise NotYetSupported(
            "ctc_loss with other lengths for each sample, as numbers", where="F.ctc_loss",
            why="a list in the code is the same at every call", fix="pass them as tensors [B] among inputs or targets",
        )  # fmt: skip
    return torch.full((log_probs.shape[1],), next(iter(given)), dtype=torch.int64, device=log_probs.device)


def is_causal(mask: Tensor | None, given: bool | None = None, size: int | None = None) -> bool:
    """Whether the caller said that the mask is causal; a mask that is given is used either way."""
    return given is True


def encoder(
    self: nn.TransformerEncoder, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:  # fmt: skip
    """Refused where torch, as no gradients are needed, drops padded positions and returns zeros for them: which ones
    that are depends on the values of the mask.
    """
    first = self.layers[0]
    drops = getattr(self, "use_nested_tensor", False) and torch.backends.mha.get_fastpath_enabled()
    padded = src.dim() == 3 and mask is None and src_key_padding_mask is not None
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (src, *first.parameters()))
    if drops and padded and not first.training and not learns:
        raise NotYetSupported(
            "a TransformerEncoder without gradients, in eval mode, returns zeros at padded positions",
            where="nn.TransformerEncoder.forward", why="torch takes this path where it sees the values of the mask",
            fix="make the encoder with enable_nested_tensor=False, or set encoder.use_nested_tensor = False",
        )  # fmt: skip
    return _ENCODER(self, src, mask, src_key_padding_mask, is_causal)


@at_capture(torch._nested_tensor_from_mask)
def nested(*_: Any, **__: Any) -> Any:
    """Refused: in the strided layout samples are tensors of their own, in the other one rows of any number."""
    raise NotYetSupported(
        "a nested tensor is made of the samples", where=users_line(sys._getframe(1)),
        why="its samples differ in size, and a graph is for one size",
        fix="keep them padded and mask the padding; or give rows and where samples begin as inputs, and say so: "
        "batch_dim=((psg_fx.Rows.from_offsets(1), None), 0)",
    )  # fmt: skip


_NESTED = ("nested_tensor", "as_nested_tensor", "narrow", "nested_tensor_from_jagged", "masked_select")
_ENCODER = nn.TransformerEncoder.forward


def grouped(x: Tensor, w: Tensor, offs: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:
    """Y[r] = x[r] @ w[e] for offs[e - 1] <= r < offs[e], in every dtype; torch's own is captured in bfloat16 alone."""
    plain = not any(r is not None for r in (*rest, *named.values()))
    if not plain or offs is None or x.dim() != 2 or w.dim() != 3:
        return torch._grouped_mm(x, w, offs, *rest, **named)
    found: Tensor = grouped_mm(x, w, offs)
    return found


at_capture(torch._grouped_mm)(grouped)
if hasattr(F, "grouped_mm"):  # since torch 2.10
    at_capture(F.grouped_mm)(lambda mat_a, mat_b, *, offs=None, **named: grouped(mat_a, mat_b, offs, **named))


@contextlib.contextmanager
def rewritten(rows: bool) -> Iterator[Padding]:
    """While the model is captured, some functions run as written here.  rows: some inputs hold rows of samples.

    How packed sequences are padded is known at the end.
    """
    with (
        contextlib.ExitStack() as stack, bags_of_rows(rows),
        patched_here(transformer, "_detect_is_causal_mask", is_causal),
        patched_here(nn.TransformerEncoder, "forward", encoder),
        patched_here(nn.AdaptiveLogSoftmaxWithLoss, "forward", adaptive_log_softmax),
        patched_here(torch.distributions.Distribution, "_validate_args", False),
        patched_here(torch.distributions.Gamma, "rsample", draws.gamma),
        orders_of_contractions(), attention_as_formula(), packed_as_padded() as padding, _Rewritten(),
    ):  # fmt: skip
        for name in _NESTED:
            if isinstance(made := getattr(torch.nested, name, None), FunctionType):
                stack.enter_context(code_replaced_here(made, lambda _: nested))
        yield padding
