"""Functions that are captured as their formulas: the same as torch's, and apart for each sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psg_fx import SamplesMixed
from psg_fx.passes.capture.functions import formulas, norms
from support.programs import Refused, Row, check_answer, check_refusal, head, program, square, tokens

EYE = torch.eye(2).double()


def of_images(x: Tensor, w: Tensor, c: Tensor, size: Any = 1) -> Tensor:
    """Tokens behind a class token, as an image that is pooled."""
    h = torch.cat([c.expand(x.shape[0], -1, -1), x @ w], 1)[:, 1:]
    return F.adaptive_avg_pool2d(h.transpose(1, 2).reshape(x.shape[0], 3, -1, 1), size).flatten(1)


ROWS = {
    "kron with a constant": Row(program(lambda x, w: torch.kron(x @ w, EYE), w=(4, 3)), square, tokens),
    "kron with a parameter": Row(program(lambda x, w, p: torch.kron(p, x @ w), w=(4, 3), p=(2, 2)), square, tokens),
    "gradient": Row(program(lambda x, w: torch.gradient(x @ w, spacing=0.5, dim=1)[0], w=(4, 3)), square, tokens),
    "gradient in two dims": Row(
        program(lambda x, w: sum(torch.gradient(x @ w, dim=(1, 2), edge_order=2)), w=(4, 3)), square, tokens
    ),
    **{
        f"a pool to {size}": Row(
            program(lambda x, w, c, to=size: of_images(x, w, c, to), w=(4, 3), c=(1, 1, 3)), square, tokens
        )
        for size in (1, (1, 1), (1, None), 2)
    },
    "a pool in one dim": Row(
        program(lambda x, w: F.adaptive_avg_pool1d((x @ w).transpose(1, 2), 1)[..., 0], w=(4, 3)), square, tokens
    ),
    "a pool in three dims": Row(
        program(lambda x, w: F.adaptive_avg_pool3d((x @ w)[:, None, :, None], (1, 1, 1)).flatten(1), w=(4, 3)),
        square, tokens,
    ),
    "cov under vmap": Row(program(lambda x, w: torch.vmap(torch.cov)(x @ w), w=(4, 3)), square, tokens),
    "corrcoef under vmap": Row(program(lambda x, w: torch.vmap(torch.corrcoef)(x @ w), w=(4, 3)), square, tokens),
} | {
    f"matrix_norm {order}": Row(
        program(lambda x, w, p=order: torch.linalg.matrix_norm(x @ w, p), w=(4, 3)), square, tokens
    )
    for order in ("fro", "nuc", 2, -2, 1, -1, math.inf, -math.inf)
} | {
    "matrix_norm along the first dims": Row(
        program(lambda x, w: torch.linalg.matrix_norm((x @ w).movedim(0, 2), 1, (1, 0), keepdim=True)[0], w=(4, 3)),
        square, tokens,
    ),
    "norm of matrices": Row(program(lambda x, w: torch.linalg.norm(x @ w, 2, (1, 2)), w=(4, 3)), square, tokens),
    "matrix_norm under vmap": Row(
        program(lambda x, w: torch.vmap(lambda a: torch.linalg.matrix_norm(a, math.inf))(x @ w), w=(4, 3)),
        square, tokens,
    ),
}  # fmt: skip


def labelled(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4).double(), torch.zeros(size).double()


MIXED: dict[str, Refused] = {
    name: (head, loss, labelled, SamplesMixed, "mixes samples")
    for name, loss in {
        "kron": lambda o, y: torch.kron(o, o).square().mean(),
        "cov": lambda o, y: torch.cov(o.T).square().mean(),
        "corrcoef": lambda o, y: torch.corrcoef(o).square().mean(),
    }.items()
}


@pytest.mark.parametrize("name", ROWS)
def test_equals_the_loop(name: str) -> None:
    check_answer(ROWS[name])


@pytest.mark.parametrize("name", MIXED)
def test_of_the_batch_is_refused(name: str) -> None:
    check_refusal(MIXED[name])


@pytest.mark.parametrize(("shape", "other"), [((3, 4), (2, 3)), ((4,), (2, 2)), ((2, 3, 2), (3,)), ((2, 2), ())])
def test_kron_is_torchs(shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    a, b = torch.randn(shape), torch.randn(other)
    torch.testing.assert_close(formulas.kron(a, b), torch.kron(a, b))


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"dim": 1},
        {"dim": (0, 2), "spacing": (0.5, 2.0)},
        {"spacing": 3.0, "edge_order": 2},
        {"dim": [-1], "spacing": [2.0]},
    ],
)
def test_gradient_is_torchs(named: dict[str, Any]) -> None:
    x = torch.randn(3, 5, 4).double()
    for found, expected in zip(formulas.gradient(x, **named), torch.gradient(x, **named), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(3, 7), (7,)])
def test_cov_and_corrcoef_are_torchs(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for correction in (0, 1, 2):
        torch.testing.assert_close(formulas.cov(x, correction=correction), torch.cov(x, correction=correction))
    torch.testing.assert_close(formulas.corrcoef(x), torch.corrcoef(x))


@pytest.mark.parametrize("order", [2, -2, 1, -1, math.inf, -math.inf])
@pytest.mark.parametrize("dim", [(-2, -1), (0, 2), (2, 0)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_norms_of_matrices_are_torchs(order: float, dim: tuple[int, int], keepdim: bool) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    expected = torch.linalg.matrix_norm(x, order, dim, keepdim)
    torch.testing.assert_close(norms.matrix_norm(x, order, dim, keepdim), expected)
    torch.testing.assert_close(norms.norm(x, order, dim, keepdim), expected)
