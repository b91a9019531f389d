"""The batch size as a value, and losses that are one number in other shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx import BadArgument, NotYetSupported, SamplesMixed
from support.programs import (
    Refused,
    Row,
    check_answer,
    check_refusal,
    classes,
    flat,
    head,
    images,
    program,
    square,
    tokens,
)
from support.selection import one_in


def total(o: Tensor, y: Tensor) -> Tensor:
    return (o - y).square().sum()


def conv() -> nn.Module:
    return nn.Conv2d(2, 2, 3)


def margin(o: Tensor, y: Tensor) -> Tensor:
    """Cosine margins, as in CosFace."""
    o = o.clone()
    o[torch.arange(len(y)), y] -= 0.35
    return F.cross_entropy(8 * o, y)


def filled(count: int, **places: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """A tensor of zeros `[B, 1, count]` with columns written, the value with `before` more leading dims."""

    def loss(o: Tensor, y: Tensor) -> Tensor:
        made = o.new_zeros(len(o), 1, count)
        made[:, :, places["columns"]] = o[(None,) * places["before"]].unsqueeze(-2)
        return (made.cumsum(-1)[..., : y.shape[-1]] - y.unsqueeze(1)).square().mean()

    return loss


COUNTED = {
    "tensor of the length": Row(head, lambda o, y: total(o, y) / torch.tensor(len(o)), flat),
    "as_tensor": Row(head, lambda o, y: total(o, y) / torch.as_tensor(o.shape[0], dtype=torch.float64), flat),
    "full": Row(head, lambda o, y: total(o, y) / torch.full((), len(o)), flat),
    "as many as there are, of how many there are": Row(
        head, lambda o, y: (o - y).square().sum() / len(o) + (o / torch.full((len(o), 1), len(o))).mean(), flat
    ),
    "new_tensor of several": Row(
        head, lambda o, y: (total(o, y) / o.new_tensor([[len(o), 2.0], [0.1 * len(o), 1 / len(o)]])).sum(), flat
    ),
    "places by range": Row(head, lambda o, y: -F.log_softmax(o, -1)[range(len(y)), y].mean(), classes),
    "places by lists": Row(head, lambda o, y: -F.log_softmax(o, -1)[list(range(len(y))), [0] * len(y)].mean(), classes),
    "a list as long as the batch": Row(
        head, lambda o, y: (torch.tensor([0.5] * len(o), dtype=o.dtype)[:, None] * o - y).square().mean(), flat
    ),
    "a float multiple": Row(head, lambda o, y: total(o, y) / (0.3 * len(o)), flat),
    "in the model": Row(program(lambda x, w: x @ w / torch.tensor(len(x)), w=(4, 3)), square, tokens),
    "written where the labels are": Row(head, margin, classes),
    "columns written": Row(head, filled(4, columns=[0, 3, 1], before=0), flat),
    "columns written from more dims": Row(head, filled(4, columns=[0, 3, 1], before=2), flat),
    "interpolate": Row(conv, lambda o, y: F.interpolate(o, scale_factor=2.0).square().sum() / len(o), images),
    "interpolate, bicubic": Row(
        conv, lambda o, y: (F.interpolate(o, size=y.shape[-2:], mode="bicubic") - y).square().sum() / len(o), images
    ),
    "take_along_dim and the length": Row(
        head, lambda o, y: o.take_along_dim(y[:, None], 1).square().sum() / len(o), classes
    ),
}  # fmt: skip


ONE_NUMBER = {
    "[1]": Row(head, lambda o, y: (o - y).square().mean(-1).mean(0, keepdim=True), flat),
    "[1, 1]": Row(head, lambda o, y: (o - y).square().mean((0, 1), keepdim=True), flat),
    "[B, 1]": Row(head, lambda o, y: (o - y).square().mean(-1, keepdim=True), flat),
    "[1, B, 1]": Row(head, lambda o, y: (o - y).square().mean(-1, keepdim=True)[None], flat),
    "reshaped": Row(head, lambda o, y: F.mse_loss(o, y).reshape(1), flat),
}

ROWS = COUNTED | ONE_NUMBER


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", one_in(3, ROWS, always=["written where the labels are"]))
def test_equals_the_loop(name: str) -> None:
    check_answer(ROWS[name])


IN_PARTS = {
    "chunks": Row(head, lambda o, y: (torch.cat([o, 2 * o]).chunk(2)[1] - y).square().mean(), flat),
    "chunks of columns": Row(head, lambda o, y: (torch.cat([o, 2 * o], -1).chunk(2, -1)[1] - y).square().mean(), flat),
    "a split": Row(head, lambda o, y: (torch.cat([o, 2 * o, o.sin()]).split(o.shape[0])[2] - y).square().mean(), flat),
    "of two inputs": Row(head, lambda o, y: torch.sub(*torch.cat([o, y]).chunk(2)).square().mean(), flat),
    "of two inputs, every row picked by its number": Row(
        head,
        lambda o, y: torch.sub(*torch.cat([o, y])[torch.arange(2 * o.shape[0])[:, None], [0, 2]].chunk(2)).sin().mean(),
        flat,
    ),
    "of two inputs, every row selected": Row(
        head,
        lambda o, y: torch.sub(*torch.cat([o, y]).index_select(0, torch.arange(2 * o.shape[0])).chunk(2)).sin().mean(),
        flat,
    ),
    "a split by name": Row(
        head, lambda o, y: torch.split(torch.cat([o, 2 * o]), split_size_or_sections=o.shape[0])[0].sum() / 7, flat
    ),
}


@pytest.mark.filterwarnings("error:one graph for each batch size")
@pytest.mark.parametrize("name", IN_PARTS)
def test_equal_parts_are_as_many_for_every_batch_size(name: str) -> None:
    check_answer(IN_PARTS[name])


REFUSED: dict[str, Refused] = {
    "a row further": (
        head, lambda o, y: torch.cat([o, y])[(torch.arange(2 * len(o)) + 1) % (2 * len(o))].sin().sum(), flat,
        SamplesMixed, "",
    ),
    "every second row": (
        head, lambda o, y: torch.cat([o, y])[torch.arange(0, 2 * len(o), 2)].sin().sum(), flat, SamplesMixed, "number",
    ),
    "a tensor of the length squared": (
        head, lambda o, y: total(o, y) / torch.tensor(len(o) ** 2), flat, NotYetSupported, "in no simple way",
    ),
    "squares of places": (
        head, lambda o, y: (torch.tensor([i * i for i in range(len(o))])[:, None] * o - y).square().mean(), flat,
        NotYetSupported, "torch.tensor([i * i",
    ),
    "two numbers": (
        head, lambda o, y: (o - y).square().mean(0)[:2], flat, BadArgument, "its shape is [2]",
    ),
    "two numbers a sample": (
        head, lambda o, y: (o - y).square()[:, :2], flat, BadArgument, "its shape is [B, 2]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_stays_refused(name: str) -> None:
    check_refusal(REFUSED[name])
