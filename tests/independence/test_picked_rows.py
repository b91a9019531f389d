"""Rows and elements picked by indices: of a sample, of a parameter, or of all samples' rows by number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx import PsgError, SamplesMixed
from support.programs import (
    C,
    Refused,
    Row,
    T,
    check_answer,
    check_refusal,
    classes,
    head,
    ids,
    program,
    square,
    tokens,
)
from support.selection import one_in

TAKEN = {
    "take_along_dim": Row(head, lambda o, y: -o.log_softmax(-1).take_along_dim(y[:, None], 1).mean(), classes),
    "take_along_dim, broadcast": Row(
        head, lambda o, y: torch.take_along_dim(o, torch.tensor([[1, 2]]), -1).square().mean(), classes
    ),
    "take_along_dim in the model": Row(
        program(lambda x, w: torch.take_along_dim(x @ w, (x @ w).argsort(-1), -1)[..., 0], w=(4, 3)), square, tokens
    ),
    "elements of a parameter": Row(program(lambda i, p: p.gather(0, i), p=(7,)), square, ids()),
    "columns of a parameter": Row(program(lambda i, p: p.gather(0, i), p=(7, 4)), square, ids(4)),
    "an expanded parameter": Row(program(lambda i, p: p.expand(len(i), -1).gather(1, i), p=(7,)), square, ids(4)),
    "take of a parameter": Row(program(lambda i, p: torch.take(p, -i) + p.sum(), p=(4, 2)), square, ids(4)),
    "diff with prepend": Row(
        program(lambda x, w: torch.diff(x @ w, dim=1, prepend=x.new_zeros(x.shape[0], 1, 3)), w=(4, 3)), square, tokens
    ),
    "diff with append, twice": Row(
        program(lambda x, w: (x @ w).diff(n=2, dim=1, append=(x @ w)[:, :1]), w=(4, 3)), square, tokens
    ),
    "diff with a parameter": Row(
        program(lambda x, w, p: torch.diff(x @ w, dim=1, prepend=p.expand(x.shape[0], 1, 3)), w=(4, 3), p=(3,)),
        square, tokens,
    ),
}  # fmt: skip


def rows_of(pick: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """`pick(h, n, c)`: of h `[B·T, C]`, with the numbers n of the samples and places c of each, `[B]` in 0..T-1."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        places = (x.sum(-1) * 3).long().abs().remainder(T)[:, 0]
        return pick((x @ w).reshape(-1, C), torch.arange(x.shape[0]), places)

    return program(function, w=(4, C))


FLAT = {
    "clamped": Row(rows_of(lambda h, n, c: h[n * T + (3 * c).clamp(0, T - 1)]), square, tokens),
    "remainder": Row(rows_of(lambda h, n, c: h[c + T * n]), square, tokens),
    "last": Row(rows_of(lambda h, n, c: h[n * T + T - 1] * h[(n + 0) * T]), square, tokens),
    "several": Row(rows_of(lambda h, n, c: h[(n[:, None] * T + torch.arange(2, T)).view(-1)]), square, tokens),
    "argmax": Row(rows_of(lambda h, n, c: h[n * T + h.view(-1, T, C).sum(-1).argmax(-1)]), square, tokens),
    "elements": Row(rows_of(lambda h, n, c: h.view(-1)[(n * T + c) * C + 1]), square, tokens),
    "index_select": Row(rows_of(lambda h, n, c: h.index_select(0, n * T + (c - 1).clamp(min=0))), square, tokens),
    "by a step": Row(rows_of(lambda h, n, c: h[torch.arange(0, len(n) * T, T) + c]), square, tokens),
    "all": Row(rows_of(lambda h, n, c: h[torch.arange(h.shape[0])]), square, tokens),
    "all, then some": Row(rows_of(lambda h, n, c: h[torch.arange(n.shape[0] * T).view(-1, T)[:, 2:]]), square, tokens),
    "repeated": Row(rows_of(lambda h, n, c: h.view(-1, T, C)[n[:, None].repeat(1, 2), c[:, None]]), square, tokens),
    "repeated, flat": Row(
        rows_of(lambda h, n, c: h.view(-1, T, C)[n.view(-1, 1).repeat(1, 2).view(-1), c.repeat_interleave(2)]),
        square,
        tokens,
    ),
    "repeated in turn": Row(
        rows_of(lambda h, n, c: h[(n * T + c).repeat_interleave(3)].view(-1, 3, C).cumsum(1)), square, tokens
    ),
    "repeated one after the other": Row(
        rows_of(lambda h, n, c: h[(n * T + c).repeat(3)].view(3, -1, C).cumsum(0).sum(0)), square, tokens
    ),
    "tiled": Row(rows_of(lambda h, n, c: h[(n * T + c).tile(2)].view(2, -1, C).prod(0)), square, tokens),
    "embedding": Row(rows_of(lambda h, n, c: F.embedding(n[:, None] * T + c[:, None], h)), square, tokens),
}


def time_first(rows: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """`rows(h, mask, layer)`: of h `[T·B, 4]`, as sequences without `batch_first` are flattened."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        h = x.transpose(0, 1).reshape(-1, 4)
        return rows(h, h[:, 0] > 0, w).view(T, -1, C).transpose(0, 1)

    return program(function, w=(4, C))


def _written(h: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    out = h.new_zeros(h.shape[0], C)
    out[mask] = (h[mask] @ w).sin()
    return out


def _added(h: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    places = mask.nonzero().squeeze(1)
    return h.new_zeros(h.shape[0], C).index_add(0, places, (h[places] @ w).sin())


TIME_FIRST = {
    "rows of steps, written": Row(time_first(_written), square, tokens),
    "rows of steps, added": Row(time_first(_added), square, tokens),
}


def sums_of_picked(numbers: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Rows that a mask `[B, T]` picks, added to the sample of their `numbers(mask, x)`."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        mask = x[..., 0] > 0
        return x.new_zeros(x.shape[0], C).index_add(0, numbers(mask, x), (x[mask] @ w).sin())

    return program(function, w=(4, C))


NUMBERED = {
    "samples of picked rows": Row(sums_of_picked(lambda m, x: torch.where(m)[0]), square, tokens),
    "samples of picked rows, as numbers": Row(
        sums_of_picked(lambda m, x: torch.arange(x.shape[0])[:, None].expand(-1, T)[m]), square, tokens,
    ),
    "samples of picked rows, as numbers of their own": Row(
        sums_of_picked(lambda m, x: torch.arange(x.shape[0]).unsqueeze(1).expand(x.shape[0], T).masked_select(m)),
        square, tokens,
    ),
}  # fmt: skip

STACKED = {
    "stacks of matrices": Row(
        program(lambda x, w: torch.hstack([torch.dstack([x @ w, x.sin() @ w]), torch.dstack([x, x])]), w=(4, 4)),
        square, tokens,
    ),
    "stacks of vectors": Row(
        program(lambda i, p: torch.column_stack([p[i], p[i].sin()]).flatten(1), p=(7, 3)), square, ids(),
    ),
    "stacks under vmap": Row(
        program(
            lambda x, w: torch.vmap(
                lambda r: torch.hstack([torch.vstack([r @ w, r[0] @ w]).sum(1), torch.dstack([r[0], r[1]]).flatten()])
            )(x),
            w=(4, C),
        ),
        square, tokens,
    ),
}  # fmt: skip

ROWS = TAKEN | FLAT | TIME_FIRST | NUMBERED | STACKED


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", one_in(3, ROWS, always=[*TIME_FIRST, *NUMBERED, *STACKED]))
def test_equals_the_loop(name: str) -> None:
    check_answer(ROWS[name])


REFUSED: dict[str, Refused] = {
    "rows of a parameter by the sample's number": (
        program(lambda i, p: p[: i.shape[0]].gather(1, i), p=(9, 7)), square, ids(4), PsgError, "",
    ),
    "take from the samples": (
        program(lambda x, w: torch.take(x @ w, torch.tensor([0, 1])), w=(4, 3)), square, tokens, SamplesMixed,
        "counts places through the rows of all samples",
    ),
    "diff over the samples": (
        program(lambda x, w: torch.diff(x @ w, dim=0, prepend=(x @ w)[:1]), w=(4, 3)), square, tokens, SamplesMixed, "",
    ),
    "a flat index of any labels": (
        rows_of(lambda h, n, c: h[n * T + 2 * c]), square, tokens, SamplesMixed, "c may lie outside of 0..4",
    ),
    "a flat index with another step": (
        rows_of(lambda h, n, c: h[n * 4 + c.clamp(max=1)]), square, tokens, SamplesMixed, "does not number the rows",
    ),
    "a flat index that starts later": (
        rows_of(lambda h, n, c: h[n * T + c - 1]), square, tokens, SamplesMixed, "c may lie outside",
    ),
    "the numbers of the samples as values": (
        rows_of(lambda h, n, c: h[n * T] * (n * T + c)[:, None]), square, tokens, SamplesMixed, "the numbers of",
    ),
    "the numbers of all rows as values": (
        rows_of(lambda h, n, c: h * torch.arange(h.shape[0])[:, None]), square, tokens, SamplesMixed, "the numbers of",
    ),
    "the numbers of all rows, from the other end": (
        rows_of(lambda h, n, c: h[torch.arange(h.shape[0]).flip(0)]), square, tokens, SamplesMixed, "the numbers of",
    ),
    "numbers by a step that is not a sample's": (
        rows_of(lambda h, n, c: h[torch.arange(0, len(n) * (T - 1), T - 1)]), square, tokens, SamplesMixed, "",
    ),
    "picked rows, added to the next sample": (
        sums_of_picked(lambda m, x: (torch.arange(x.shape[0])[:, None].expand(-1, T)[m] + 1) % x.shape[0]), square,
        tokens, PsgError, "",
    ),
    "picked rows, added to samples counted down": (
        sums_of_picked(lambda m, x: torch.arange(x.shape[0] - 1, -1, -1)[:, None].expand(-1, T)[m]), square, tokens,
        PsgError, "",
    ),
    "picked rows, added by their places": (
        sums_of_picked(lambda m, x: torch.arange(T).expand(x.shape[0], T)[m] % x.shape[0]), square, tokens,
        PsgError, "",
    ),
    "numbers taken from numbers": (
        rows_of(lambda h, n, c: h[c * T - n]), square, tokens, SamplesMixed, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_stays_refused(name: str) -> None:
    check_refusal(REFUSED[name])
