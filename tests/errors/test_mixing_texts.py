"""Whole texts of the refusals of programs whose samples mix."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from psg_fx.errors import NotYetSupported, PsgError
from psg_fx.passes.independence.batch import batch
from support.graphs import captured


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x[:, None]))


def _line(text: str) -> str:
    """The text without the number of the line."""
    return re.sub(r"test_mixing_texts.py:\d+:", "test_mixing_texts.py:", text)


def refusal(function: nn.Module | Callable[[Tensor], Tensor]) -> str:
    with pytest.raises(PsgError) as error:
        batch(captured(function, None, (torch.randn(4, 6),)))
    return _line(str(error.value))


def test_text_for_batch_norm() -> None:
    assert refusal(Normed()) == (
        "aten._native_batch_norm_legit_functional mixes samples, so per-sample gradients do not exist\n"
        "  where  %_native_batch_norm_legit_functional, sample dim 0;  "
        "test_mixing_texts.py: return self.bn(self.conv(x[:, None]))\n"
        "  why    its mean runs over dims 0, 2; dim 0 holds the samples of %conv1d\n"
        "  fix    use GroupNorm, or model.eval() so that running statistics are used"
    )


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_text_for_a_batch_statistic() -> None:
    assert refusal(Centred()) == (
        "aten.sub mixes samples, so per-sample gradients do not exist\n"
        "  where  %sub, sample dim 0;  test_mixing_texts.py: return x - x.mean(0)\n"
        "  why    %inputs_0 carries samples, %mean is reduced over them by %mean (aten.mean, "
        "test_mixing_texts.py: return x - x.mean(0))\n"
        "  fix    a statistic over the batch makes each sample's loss depend on the others; take it within a sample"
    )


class Misfolded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2 * x.shape[0], 3).view(2, x.shape[0], 3)


def test_text_for_a_fold_in_the_wrong_order() -> None:
    assert refusal(Misfolded()) == (
        "aten.reshape mixes samples, so per-sample gradients do not exist\n"
        "  where  %view_1, sample dim 0 = B·2;  "
        "test_mixing_texts.py: return x.reshape(2 * x.shape[0], 3).view(2, x.shape[0], 3)\n"
        "  why    the samples are laid out as 1·B·6 elements, but the new dim 1 expects 2 elements before and 3 after "
        "it, so a row of it holds parts of several samples\n"
        "  fix    fold the sample dim outermost or innermost consistently: permute it next to the dims it is folded "
        "with first"
    )


def test_text_for_an_op_that_cannot_be_shown() -> None:
    with pytest.raises(NotYetSupported, match=r"aten\.as_strided cannot be shown to keep samples apart"):
        batch(captured(lambda x: x.as_strided((x.shape[0], 2), (6, 1)), None, (torch.randn(4, 6),)))
