"""The user's own parameters and buffers for the code that runs on others in their places.

Whoever traces a model puts tensors of its own in the places of the model's.  To code that asks which tensor it holds
(`p is self.anchor`, `p in frozen`, `optimizer.state[p]`), of what class, or for an attribute (`p.no_decay`), these are
strangers.  So while the code runs, the model holds its own again, and torch's functions are given what stands in for
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_Place = tuple[dict[str, Any], str, Tensor]


class StandIns:
    """What stands in the places of a model's tensors; nothing does before `expected`."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._for: dict[int, Tensor] = {}
        self._of: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def expected(self, root: nn.Module) -> Iterator[None]:
        """While open, what the modules hold now is their own."""
        groups = [held for module in root.modules() for held in (module._parameters, module._buffers)]
        self._places = [(held, name, own) for held in groups for name, own in held.items() if own is not None]
        try:
            yield
        finally:
            self._places = []

    @contextlib.contextmanager
    def own_in_place(self) -> Iterator[None]:
        """While open, the model holds its own tensors; what the code puts in a place stays there."""
        found = [(place, place[0].get(place[1])) for place in self._places]
        others = [(place, other) for place, other in found if isinstance(other, Tensor) and other is not place[2]]
        self._for = {id(own): other for (_, _, own), other in others}
        self._of = {id(other): own for (_, _, own), other in others}
        for (held, name, own), _ in others:
            held[name] = own
        try:
            yield
        finally:
            for (held, name, own), other in others:
                if held.get(name) is own:
                    held[name] = other
            self._for, self._of = {}, {}

    def given(self, value: Any) -> Any:
        """An argument, with what stands in for the model's own tensors."""
        if isinstance(value, Tensor):
            return self._for.get(id(value), value)
        kind = type(value)
        if kind is tuple or kind is list:
            found = [self.given(v) for v in value]
            return kind(found) if any(new is not old for new, old in zip(found, value, strict=True)) else value
        if kind is dict:
            return {key: self.given(v) for key, v in value.items()}
        return value

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The model's own tensors, each with what stands in for it."""
        return [(own, self._for[id(own)]) for own in self._of.values()]

    def own(self, result: Any) -> Any:
        """A result: the model's own tensor for what stands in for it, which a function that writes in place returns."""
        return self._of.get(id(result), result)
