"""A call of a custom `torch.autograd.Function` as one opaque op of the captured graph, with the user's backward kept
beside it: a graph that holds what its forward computes would lose it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.autograd import Function
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.graph.facts import is_differentiable
from psg_fx.ops.define import define_function
from psg_fx.ops.of_users.argument_closures import reading
from psg_fx.ops.of_users.argument_objects import are_the_same, held_by
from psg_fx.ops.of_users.argument_sizes import has_symbols, of_call, without_symbols
from psg_fx.tensors import SYMBOLS
from psg_fx.torch_private.custom_functions import apply, without_tracer
from psg_fx.torch_private.modes import autocast_now, autocast_unseen, not_recorded, without_functions

_CALLS: WeakValueDictionary[Any, CustomCall] = WeakValueDictionary()
"""Of each op, as long as somebody keeps the call: it may hold the model, as an argument of the function."""


@dataclass(frozen=True)
class CustomCall:
    """A call of a custom function: arguments that are no tensors are fixed, `call(*tensors)` fills in the others.

    needs: which of the tensors require a gradient in the program (`ctx.needs_input_grad`).  casts: its autocast.
    writes: the tensors that it writes into; it is given copies of them.  line: the user's, that calls it.  originals:
    the tensors of the capture, which a function among the arguments may close over.
    """

    function: type[Function]
    constants: tuple[tuple[int, Any], ...]
    spec: pytree.TreeSpec
    needs: tuple[bool, ...]
    casts: Mapping[str, torch.dtype]
    writes: tuple[int, ...] = ()
    line: str = ""
    originals: tuple[torch.Tensor, ...] = ()

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Its result: a tensor, or a tuple of several."""
        found = [v for v in listed(self.result(tensors)) if isinstance(v, torch.Tensor)]
        return found[0] if len(found) == 1 else tuple(found)

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Its result as it returns it."""
        args = self._filled([t.clone() if i in self.writes else t for i, t in enumerate(tensors)])
        before = held_by(args)
        with autocast_unseen(self.casts):
            result = apply(self.function, *args)
        if not are_the_same(before, held_by(args)):
            raise self.refusal("it changes a list, a dict or an object among its arguments", "return what it finds")
        return result

    def under_autograd(self, *tensors: torch.Tensor) -> Any:
        """`call(*tensors)` where the parameters among them, which do not require gradients here, are said to."""
        return self(*(t.detach().requires_grad_() if n and not t.requires_grad else t
                      for n, t in zip(self.needs, tensors, strict=True)))  # fmt: skip

    def _filled(self, tensors: Sequence[Any]) -> list[Any]:
        others = {id(own): t for own, t in zip(self.originals, tensors, strict=True)}
        fixed = {i: reading(of_call(kept, tensors), others) for i, kept in self.constants}
        rest = iter(tensors)
        count = len(fixed) + len(self.needs)
        args: list[Any] = pytree.tree_unflatten(
            [fixed[i] if i in fixed else next(rest) for i in range(count)], self.spec
        )
        return args

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def title(self) -> str:
        """What it is for the user, who may have written something else."""
        names: tuple[str, str] | None = getattr(self.function, "_psg_fx_names", None)
        return names[0] if names else f"the custom function {self.name}"

    @property
    def fixed(self) -> tuple[Any, ...]:
        """What is not a tensor: the function, and its arguments with their places."""
        return (
            self.function,
            self.spec,
            self.needs,
            self.writes,
            *itertools.chain(*self.constants, *self.casts.items()),
        )

    def refusal(self, why: str, fix: str = "write the function with ordinary differentiable ops") -> NotYetSupported:
        """The error for a function that cannot be part of a graph."""
        kind = self.function
        _, where = getattr(kind, "_psg_fx_names", ("", f"{kind.__module__}.{kind.__qualname__}.apply"))
        where = f"{where};  {self.line}" if self.line else where
        return NotYetSupported(f"{self.title} is not supported", where=where, why=why, fix=fix)


def custom_call(target: Any) -> CustomCall | None:
    """The custom function that an op of a graph stands for."""
    return _CALLS.get(target)


def as_one_op(
    function: type[Function],
    args: Sequence[Any],
    keep: Callable[[CustomCall], None],
    wrote: Callable[[torch.Tensor, NotYetSupported], None] | None = None,
    line: str = "",
) -> Any:
    """`function.apply(*args)` as one op, which a tracer records as it is.

    keep: is given the call, which must live as long as graphs with the op.  wrote: is given an intermediate value that
    the function has written into, of which the graph knows nothing, and the refusal of what reads it from then on; None
    where none may be written.
    """
    flat, spec = _flattened(list(args))
    inputs = [v for v in flat if isinstance(v, torch.Tensor)]
    others = ((i, without_tracer(v)) for i, v in enumerate(flat) if not isinstance(v, torch.Tensor))
    constants = tuple((i, without_symbols(v, inputs)) for i, v in others)
    needs = tuple(t.requires_grad and is_differentiable(t) for t in inputs)
    call = CustomCall(function, constants, spec, needs, autocast_now(), line=line, originals=tuple(inputs))
    if any(has_symbols(kept) for _, kept in constants):
        raise call.refusal(
            "a number made of the batch size is among its arguments", "let it read the size of a tensor: x.shape[0]"
        )
    result, writes = _first_result(call, inputs)
    call = dataclasses.replace(call, writes=writes)
    outputs = listed(result)
    _check_outputs(call, outputs)
    count = sum(isinstance(v, torch.Tensor) for v in outputs)
    op = define_function(call.name, len(inputs), _schema(count), lambda *given: _forward(_CALLS[op], given))
    _CALLS[op] = call
    keep(call)
    made = op(*inputs)
    for i in writes:
        refusal = call.refusal("it writes into its input, which is read again afterwards", _BY_NEW)
        if wrote is None:
            raise refusal
        wrote(inputs[i], refusal)
    rest = iter([made] if count == 1 else made)
    found = tuple(next(rest) if isinstance(v, torch.Tensor) else v for v in outputs)
    return found if isinstance(result, tuple) else found[0]


def _flattened(args: list[Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """A shape is one argument: what `pytree` would put together again is a tuple."""
    return pytree.tree_flatten(args, is_leaf=lambda value: isinstance(value, torch.Size))


def _check_outputs(call: CustomCall, outputs: Sequence[Any]) -> None:
    for value in outputs:
        inside = [] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
        if any(isinstance(v, torch.Tensor) for v in inside):
            raise call.refusal("it returns a tensor within something else", "return all tensors in one tuple")
        if any(isinstance(v, SYMBOLS) for v in inside):
            raise call.refusal("it returns the batch size", "take it of a tensor, outside: x.shape[0]")
    tensors = [id(v) for v in outputs if isinstance(v, torch.Tensor)]
    if not tensors:
        raise call.refusal("it returns no tensor")
    if len(set(tensors)) < len(tensors):
        raise call.refusal("it returns one tensor twice", "return it once")


def _schema(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _first_result(call: CustomCall, tensors: Sequence[torch.Tensor]) -> tuple[Any, tuple[int, ...]]:
    """What the call returns, and the tensors that it writes into."""
    with not_recorded(), torch.no_grad():  # a tensor that forward makes of a number is fake, like those it is given
        given = [t.clone().requires_grad_(t.requires_grad) for t in tensors]
        versions = [t._version for t in given]
        result = call.result(given)
        written = tuple(i for i, t in enumerate(given) if t._version != versions[i])
    for i in written:
        if not _is_intermediate(tensors[i]) or _lies_in(given[i], listed(result)):
            raise call.refusal("it writes into its input", _BY_NEW)
    return result, written


_BY_NEW = "let it make a new tensor: x = x - m in place of x -= m"


def _lies_in(tensor: torch.Tensor, results: Sequence[Any]) -> bool:
    """Whether one of the results is made of the tensor's memory."""
    with without_functions():
        made = [t for t in results if isinstance(t, torch.Tensor) and t.layout is torch.strided]
        return any(t.untyped_storage()._cdata == tensor.untyped_storage()._cdata for t in made)


def _is_intermediate(tensor: torch.Tensor) -> bool:
    """Whether no memory of the batch's or of the model's is in it."""
    with without_functions():
        base = tensor if tensor._base is None else tensor._base
        return tensor.grad_fn is not None and base.grad_fn is not None


def _forward(call: CustomCall, given: Sequence[torch.Tensor]) -> Any:
    """What the op `psg_fx_functions::name_k(Tensor, ..) -> Tensor or (Tensor, ..)` computes."""
    with torch.no_grad():
        return pytree.tree_map_only(torch.Tensor, lambda t: t.clone() if _is_any(t, given) else t, call(*given))


def _is_any(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(tensor is other for other in others)


def listed(result: Any) -> list[Any]:
    """What a function returns, as a list."""
    return list(result) if isinstance(result, tuple) else [result]
