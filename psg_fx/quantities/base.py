"""What users ask of per-sample gradients.

A quantity says which contractions of every parameter's gradient it needs (`asks`), how per-sample weights follow from
the norms (`weights`), and how its result is put together (`finish`).  It does not know how gradients are computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from psg_fx.algebra.ask import Ask
from psg_fx.algebra.gradient import ParameterGradient
from psg_fx.errors import BadArgument

Results = Mapping[str, Mapping[str, torch.Tensor]]
"""Ask key -> parameter name -> tensor."""


Weights = Mapping[str, Mapping[str, torch.Tensor]]
"""Name of the weights -> parameter name -> [B]."""


Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name -> shape, in the model's order."""


Join = Literal["cat", "sum", "mean", "variance", "local", "groups", "unknown"]
"""How results of parts become that of the batch; a mean is weighted by numbers of samples.  A variance needs the
means of the parts as well; what is local belongs to the samples of a part, as it does not follow from those of parts;
nor does a mean over groups.
"""

Joins = Mapping[str, Join]
"""Field of the output -> how it is joined."""


@dataclass(frozen=True)
class Extra:
    """A further input of the graph.

    shape: None stands for B.  dtype: None: that of bounds and weights.  value: fixed once and for all.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype | None = None
    value: torch.Tensor | None = None


@dataclass(frozen=True)
class Quantity:
    """Base of all quantities.

    field: of the step's output, which it fills.  reads: keyword arguments of the call that it needs.
    reads_each: those of them that have an entry for every sample.  over_samples: its B is the number of samples also
    where gradients are those of groups of samples.  leaves_out: names of its weights whose zeros stand for samples that
    have no part in the sum, whatever their gradient is.  linear: of one outside of psg_fx, whether what it says of a
    group of samples is the sum of what it says of the group's parts: then these may lie in several batches.
    """

    field: ClassVar[str] = ""
    leaves_out: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()
    reads_each: ClassVar[tuple[str, ...]] = ()
    over_samples: ClassVar[bool] = False
    linear: ClassVar[bool] = False

    def resolved(self, shapes: Shapes, given: Mapping[str, Any]) -> Quantity:
        """The quantity with everything that this call's keyword arguments fix about the graph."""
        return self

    @property
    def variant(self) -> Hashable:
        """What tells the graph of a resolved quantity from those of other calls."""
        return None

    def asks(self) -> tuple[Ask, ...]:
        """What is contracted for every parameter."""
        raise NotImplementedError

    def extras(self, gradients: Mapping[str, ParameterGradient]) -> dict[str, Extra]:
        """Further inputs of the graph by name."""
        return {}

    def values(self, shapes: Shapes, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of `extras` for one call, from the call's keyword arguments and the quantity's own settings."""
        return {}

    def weights(self, r: Results, extras: Mapping[str, torch.Tensor]) -> dict[str, Mapping[str, torch.Tensor]]:
        """Per-sample weights by name, each parameter -> [B], once the norms are known."""
        return {}

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        """The fields of the output."""
        raise NotImplementedError

    def joins(self) -> Joins:
        """How each of these fields follows from those of the batch's parts; empty where it does not."""
        return {}

    def joins_of_processes(self) -> Joins:
        """The same of the shares of several processes, each with a field of its own for its samples."""
        return self.joins() or {self.field: "unknown"}


def check_choice(owner: str, name: str, value: str, known: Sequence[str], why: str = "") -> None:
    """Refuse an argument that is none of the known words; without a reason of its own, the error lists them."""
    if value not in known:
        raise BadArgument(
            f"{name}={value!r} is unknown", where=f"{owner}({name}=...)", why=why or f"known are {', '.join(known)}",
            fix=" or ".join(f'{name}="{word}"' for word in known) if why else "use one of those",
        )  # fmt: skip


def check_flag(owner: str, name: str, value: bool) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise BadArgument(
            f"{name}={value!r} is neither True nor False", where=f"{owner}({name}=...)", why="it is a switch",
            fix=f"{name}=True or {name}=False",
        )  # fmt: skip
