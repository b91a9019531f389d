"""What a benchmark's contenders are given, and what they must answer: a model with a batch, and a quantity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from psg_fx.errors import BadArgument
from psg_fx.measure.clock import peak_memory
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.clipped_sum import ClippedSum
from psg_fx.quantities.names import USUAL, spelled
from psg_fx.quantities.products import Dots
from psg_fx.quantities.sums import Grads, Norms
from psg_fx.reference.batch import Batch, as_tree, has_rows, is_packed
from psg_fx.reference.definitions import Answer, definitions_for
from psg_fx.reference.loop import Loss, WithLoss, each_loss, tracked

Computation = Callable[[], Answer]

ORDINARY = "ordinary"


Asked = Iterable[str | Quantity] | Mapping[str, Quantity]
"""Names of the usual ones, or quantities, by label if need be."""


@dataclass(frozen=True)
class Problem:
    """A model, its loss and one batch; `backend` is what the compiled contenders pass to `torch.compile`."""

    model: nn.Module
    loss_fn: Loss
    inputs: Any
    targets: Any
    batch_dim: Any = 0
    backend: str = "inductor"

    @cached_property
    def batch(self) -> Batch:
        """The batch taken apart, to slice single samples.  Raises BadArgument where these are rows."""
        return Batch.of(self.inputs, self.targets, self.batch_dim)

    @property
    def in_rows(self) -> bool:
        """Whether samples are rows, so that none is a slice of the batch."""
        return has_rows(self.batch_dim)

    @cached_property
    def flat(self) -> tuple[list[Any], TreeSpec]:
        """The leaves of `(inputs, targets)`, and how these are made of them."""
        return tree_flatten((as_tree(self.inputs), as_tree(self.targets)), is_leaf=is_packed)

    @cached_property
    def size(self) -> int:
        """The number of samples."""
        if not self.in_rows:
            return self.batch.size
        with torch.no_grad():
            return sum(1 for _ in self.losses())

    def losses(self) -> Iterator[Tensor]:
        """The loss of each sample, computed by itself; of rows, those of the whole batch."""
        return each_loss(self.program, self.inputs, self.targets, self.batch_dim)

    @cached_property
    def wanted(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name."""
        return tracked(self.model, None)

    @cached_property
    def program(self) -> WithLoss:
        """Model and loss as one module."""
        return WithLoss(self.model, self.loss_fn)

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What a step is called with."""
        return (self.inputs,) if self.targets is None else (self.inputs, self.targets)

    @property
    def call(self) -> tuple[nn.Module, Loss, Any, Any]:
        """What references take, beside `batch_dim`."""
        return self.model, self.loss_fn, self.inputs, self.targets

    def given(self, quantity: Quantity) -> dict[str, Any]:
        """Values for what the quantity reads at the call: weights of one, directions drawn with seed 0."""
        found: dict[str, Any] = {}
        if "weights" in quantity.reads and getattr(quantity, "weighted", True):
            found["weights"] = torch.ones(self.size, device=self.device)
        if isinstance(quantity, Dots):
            lead = () if quantity.count is None else (quantity.count,)
            draw = torch.Generator().manual_seed(0)
            found["directions"] = {
                name: torch.randn(*lead, *p.shape, generator=draw).to(p) for name, p in self.wanted.items()
            }
        return found


@dataclass(frozen=True)
class Contender:
    """`name` computes `quantity` ("ordinary": the gradient of the batch's loss).

    build: everything that is done once (wrappers, tracing) belongs to it or to the first call of the step it returns.
    usual: measured unless told not to.  peer: another library's or torch's own way.  memory: bytes that a step takes.
    rounding: the relative error that it says it makes, beside what is tolerated of all.
    """

    name: str
    quantity: str
    build: Callable[[Problem], Computation]
    usual: bool = True
    peer: bool = False
    memory: Callable[[Computation, torch.device], int] = peak_memory
    rounding: float = 0.0

    @property
    def label(self) -> str:
        """`name/quantity`, or the name alone for an ordinary step."""
        return self.name if self.quantity == ORDINARY else f"{self.name}/{self.quantity}"


def from_grads(quantity: Quantity, grads: Mapping[str, Tensor], given: Mapping[str, Any]) -> Answer:
    """The quantity from materialised gradients `name -> [B, *shape]`."""
    if isinstance(quantity, Grads):
        return grads
    if quantity == Norms() or is_plain_clipping(quantity):
        norms = torch.stack([(g.flatten(1) if g.dim() > 1 else g[:, None]).square().sum(1) for g in grads.values()])
        norm = norms.sum(0).sqrt()
        if not is_plain_clipping(quantity):
            return norm
        factors = (quantity.max_norm / norm).clamp(max=1.0)
        return {name: torch.einsum("b,b...->...", factors, g) for name, g in grads.items()}
    check = next((c for c in definitions_for([quantity], given)[0] if c.field == quantity.field), None)
    if check is None:
        raise NotImplementedError(f"{quantity.field} has no formula that starts from materialised gradients")
    return check.expected(torch.empty(0), grads)


def is_plain_clipping(quantity: Quantity) -> TypeGuard[ClippedSum]:
    """Whether it is Σᵢ min(1, max_norm / ‖gᵢ‖) gᵢ with one norm for the whole model, which others compute too."""
    return isinstance(quantity, ClippedSum) and quantity == ClippedSum(max_norm=quantity.max_norm)


def by_label(quantities: Asked) -> dict[str, Quantity]:
    """Quantities by how their rows are labelled; those of `USUAL` may be given by name."""
    if isinstance(quantities, Mapping):
        return dict(quantities)
    found: dict[str, Quantity] = {}
    for asked in [quantities] if isinstance(quantities, (str, Quantity)) else quantities:
        if isinstance(asked, Quantity):
            found[spelled(asked)] = asked
        elif asked in USUAL:
            found[asked] = USUAL[asked]
        else:
            raise BadArgument(
                f"no contender computes {asked!r}",
                where="quantities",
                why=f"names stand for {', '.join(spelled(q) for q in USUAL.values())}",
                fix="name one of these, or pass a quantity such as psg_fx.Gram()",
            )
    return found
