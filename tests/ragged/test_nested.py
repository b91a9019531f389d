"""Nested tensors: refused as inputs and inside a model, and their rows as samples of any number of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import BadArgument, NotYetSupported
from support.rows_of_samples import gradient

LAYOUTS = {"strided": torch.strided, "jagged": torch.jagged}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nested_inputs_are_refused(layout: str) -> None:
    x = torch.nested.nested_tensor([torch.randn(n, 4) for n in (3, 2)], layout=LAYOUTS[layout])
    with pytest.raises(BadArgument, match=r"input_0 is nested(.|\n)*to_padded_tensor(.|\n)*Rows.from_offsets"):
        psg_fx.transform(nn.Linear(4, 3), lambda out: out.sum(), backend="eager")((x,))


class Pooled(nn.Module):
    """The sum of what a layer makes of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        sample = torch.searchsorted(offsets, torch.arange(rows.shape[0]), right=True) - 1
        rows = self.layer(rows).tanh()
        return rows.new_zeros(offsets.shape[0] - 1, 3).index_add(0, sample, rows)


def test_the_rows_of_a_nested_tensor() -> None:
    """The way out that the refusal names."""
    torch.manual_seed(0)
    model = Pooled().double()
    x = [torch.randn(n, 4, dtype=torch.float64) for n in (3, 2, 4)]
    y = torch.tensor([0, 2, 1])
    whole = torch.nested.nested_tensor(x, layout=torch.jagged)
    step = psg_fx.transform(
        model, F.cross_entropy, batch_dim=((psg_fx.Rows.from_offsets(1), None), 0), backend="eager",
        quantities=psg_fx.Grads(),
    )  # fmt: skip
    out = step((whole.values(), whole.offsets()), y)
    for s, rows in enumerate(x):
        loss = F.cross_entropy(model(rows, torch.tensor([0, len(rows)])), y[s : s + 1])
        for name, g in gradient(loss, dict(model.named_parameters())).items():
            torch.testing.assert_close(out.grads[name][s], g, atol=1e-10, rtol=1e-10)


MADE: dict[str, Callable[[Tensor, Tensor, torch.layout], Tensor]] = {
    "of a list": lambda x, n, layout: torch.nested.nested_tensor([x[0]], layout=layout),
    "of a batch": lambda x, n, layout: torch.nested.as_nested_tensor(x, layout=layout),
    "by lengths": lambda x, n, layout: torch.nested.narrow(x, 1, 0, n, layout=layout),
    "by offsets": lambda x, n, layout: torch.nested.nested_tensor_from_jagged(
        x.flatten(0, 1), torch.cat([n.new_zeros(1), n.cumsum(0)])
    ),
}


class Nested(nn.Module):
    def __init__(self, made: Callable[[Tensor, Tensor, torch.layout], Tensor], layout: torch.layout) -> None:
        super().__init__()
        self.layer, self.made, self.layout = nn.Linear(4, 3), made, layout

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return torch.nested.to_padded_tensor(self.layer(self.made(x, lengths, self.layout)), 0.0).sum((1, 2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MADE)
def test_nested_tensors_in_a_model_are_refused(name: str, layout: str) -> None:
    step = psg_fx.transform(Nested(MADE[name], LAYOUTS[layout]), lambda out: out, backend="eager")
    with pytest.raises(NotYetSupported, match=r"nested tensor(.|\n)*test_nested.py(.|\n)*mask(.|\n)*Rows.from_offsets"):
        step((torch.randn(2, 5, 4), torch.tensor([5, 5])))
