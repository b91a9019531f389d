"""What modules hold beside their parameters, and code that runs may change: buffers, attributes and hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from psg_fx.reference.batch import cast

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = [name for name, held in nn.Module().__dict__.items() if "hook" in name and isinstance(held, dict)]


def modules_of(*roots: Any) -> list[nn.Module]:
    """Every module of these trees once; what is no module has none."""
    return list(dict.fromkeys(m for root in roots if isinstance(root, nn.Module) for m in root.modules()))


class State:
    """The buffers, attributes and hooks of some modules as they are now, values of tensors included."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        places: list[tuple[Any, frozenset[str]]] = []
        for m in modules:
            own = (m._buffers, *(m.__dict__[name] for name in _HOOKS if name in m.__dict__))
            places += [*((held, frozenset[str]()) for held in own), (m.__dict__, _OF_EVERY_MODULE)]
        self._held = [(held, _own(held, skip), skip) for held, skip in places if isinstance(held, dict)]
        tensors = {t for _, own, _ in self._held for t in own.values() if isinstance(t, Tensor)}
        self._values = {t: t.detach().clone() for t in tensors if not isinstance(t, nn.Parameter)}

    def restore(self) -> None:
        """The same objects with the same values lie where they lay, and nothing else does."""
        with torch.no_grad():
            for tensor, value in self._values.items():
                if tensor.layout is torch.strided and not tensor.is_inference() and not torch.equal(tensor, value):
                    tensor.copy_(value)
        self._put(lambda value: value)

    def lend(self, dtype: torch.dtype | None) -> None:
        """Copies in `dtype` (None: their own) lie there, so that writing into them changes nothing that is kept."""
        fresh = {t: cast(value, dtype).clone() for t, value in self._values.items()}
        self._put(lambda value: fresh.get(value, value) if isinstance(value, Tensor) else value)

    def _put(self, shown: Callable[[Any], Any]) -> None:
        for held, own, skip in self._held:
            for key in _own(held, skip).keys() - own.keys():
                del held[key]
            held.update({key: shown(value) for key, value in own.items()})


def _own(held: dict[str, Any], skip: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in held.items() if key not in skip}


@contextmanager
def unchanged(*roots: Any) -> Iterator[Callable[[], None]]:
    """A block that leaves buffers and attributes of these modules as they were; yields what puts them back earlier."""
    state = State(modules_of(*roots))
    try:
        yield state.restore
    finally:
        state.restore()


def called_with(
    module: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], tie_weights: bool = True
) -> Any:
    """`torch.func.functional_call`, after which the module holds its own tensors again.

    Torch swaps those of a module that has two names twice, and then leaves what it had put there (torch 2.13).
    """
    lent = {id(t) for t in tensors.values()}
    kinds: list[dict[str, Any]] = [kept for m in modules_of(module) for kept in (m._parameters, m._buffers)]
    held = [(kept, dict(kept)) for kept in kinds]
    try:
        return torch.func.functional_call(module, dict(tensors), args, tie_weights=tie_weights)
    finally:
        for kept, own in held:
            kept.update({name: t for name, t in own.items() if id(kept.get(name)) in lent})
