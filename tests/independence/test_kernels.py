"""Convolutions in which every sample has kernels of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psg_fx import NotYetSupported, PsgError
from support.programs import (
    Refused,
    Row,
    check_answer,
    check_refusal,
    program,
    square,
)


def kernels(size: int) -> tuple[Any, None]:
    """Images and the kernels of each sample."""
    return (torch.randn(size, 2, 5, 5).double(), torch.randn(size, 3, 2, 3, 3).double()), None


def grouped(x: Tensor, k: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Each sample a group of its own."""
    size = x.shape[0]
    out = F.conv2d((x * w).reshape(1, -1, 5, 5), (k * v).reshape(-1, 2, 3, 3), groups=size)
    return out.view(size, 3, 3, 3)


def shared_image(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One image that all samples share, under the kernels of each."""
    image = torch.linspace(-1, 1, 50, dtype=k.dtype).view(1, 2, 5, 5).sin()
    return F.conv2d(image, (k * v).reshape(-1, 2, 3, 3), padding=1).view(k.shape[0], 3, 5, 5) * x[:, :1]


def learned_image(x: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """The image is a parameter."""
    return F.conv2d(p, k.reshape(-1, 2, 3, 3), padding=1).view(k.shape[0], 3, 5, 5) * x[:, :1]


KERNELS = {
    "groups": Row(program(grouped, w=(2, 1, 1), v=(3, 1, 1, 1)), square, kernels),
    "a shared image": Row(program(shared_image, v=(3, 1, 1, 1)), square, kernels),
    "a parameter as the image": Row(program(learned_image, p=(1, 2, 5, 5)), square, kernels),
}


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", KERNELS)
def test_equals_the_loop(name: str) -> None:
    check_answer(KERNELS[name])


REFUSED: dict[str, Refused] = {
    "kernels of all samples on every image": (
        program(lambda x, k, w: F.conv2d(x * w, k.reshape(-1, 2, 3, 3)), w=(2, 1, 1)), square, kernels, NotYetSupported,
        "groups=B",
    ),
    "samples as channels of the kernel": (
        program(lambda x, k, w: F.conv2d(w[None], k[:, 0, 0][None]), w=(3, 5, 5)), square, kernels, PsgError, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_stays_refused(name: str) -> None:
    check_refusal(REFUSED[name])
