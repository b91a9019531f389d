"""The derivatives of `torch.func` in a model or loss: `grad`, `vjp`, `jvp`, `jacrev`, `jacfwd`, `hessian`.

Torch has a level of autograd for each, whose tensors no trace follows.  What they compute is what `torch.autograd.grad`
does, which a capture knows as an op (`own_gradients.py`): of values that are the function's arguments, and nothing else
is, so that what the function reads besides is constant.  A product with the Jacobian is the gradient of a product with
its transpose, which is linear in what it is multiplied by: J t = d(Jᵀ u)/du t.  Under `vmap` that op has a rule.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.program.code import users_line
from psg_fx.source import is_library
from psg_fx.torch_private.derivatives import SET_GRAD_ENABLED, chosen, derivatives_by, with_chosen
from psg_fx.torch_private.modes import (
    no_functorch_levels,
    not_recorded,
    sliced_by_vmaps,
    untransformed,
    without_functions,
)
from psg_fx.torch_private.patching import patched_here

from .own_gradients import gradients, ones

Argnums = int | tuple[int, ...] | None
EMPTY: Mapping[str, Any] = MappingProxyType({})


@contextlib.contextmanager
def functional_derivatives() -> Iterator[None]:
    """While open, what `torch.func` differentiates is part of the graph, and forward mode by hand is refused."""

    def enter(level: forward_ad.dual_level) -> Any:
        raise NotYetSupported(
            "the code opens a level of forward-mode AD", where="torch.autograd.forward_ad.dual_level",
            why="it belongs to the process, and its tensors to no graph", fix="take torch.func.jvp",
        )  # fmt: skip

    with derivatives_by(_grad_and_value, _vjp, _jvp), patched_here(forward_ad.dual_level, "__enter__", enter):
        yield


def _grad_and_value(
    func: Callable[..., Any], argnums: Argnums, has_aux: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    way = _Way(func, args, _counted(argnums, args), has_aux, kwargs)
    if not isinstance(way.result, Tensor) or way.result.dim():
        found = f"one of shape {tuple(way.result.shape)}" if isinstance(way.result, Tensor) else type(way.result)
        raise RuntimeError(f"torch.func.grad takes a function of which the result is a scalar tensor, not {found}")
    derivative = way.pulled([ones(way.result)])
    return _as_outside((derivative, (way.result, way.aux) if has_aux else way.result))


def _vjp(func: Callable[..., Any], *primals: Any, argnums: Argnums = None, has_aux: bool = False) -> Any:
    way = _Way(func, primals, _counted(argnums, primals), has_aux)
    constant = not torch.is_grad_enabled()

    def pulled(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        given = _leaves_like(way.result, cotangents)
        learning = torch.is_grad_enabled() if create_graph is None else create_graph
        if constant and learning and any(untransformed(each).requires_grad for each in given):
            raise _refused("is constant for a product that is not", "vjp was taken where gradients are off", "detach")
        return _as_outside(way.pulled(given), learning and not constant)

    result = _as_outside(way.result)
    return (result, pulled, _as_outside(way.aux)) if has_aux else (result, pulled)


def _jvp(
    func: Callable[..., Any], primals: Any, tangents: Any, argnums: Argnums, *, strict: bool = False, has_aux: bool
) -> Any:
    way = _Way(func, primals, argnums, has_aux, forward=True)
    given = _leaves_like(primals if argnums is None else chosen(primals, argnums), tangents)
    learning = [k for k, output in enumerate(way.outputs) if untransformed(output).requires_grad]
    tangents_out = [torch.zeros_like(output) for output in way.outputs]
    with torch.enable_grad():
        seeds = [_own(tangents_out[k]) for k in learning]
        pulled = gradients([way.outputs[k] for k in learning], way.inputs, seeds)
        for k, tangent in zip(learning, gradients(pulled, seeds, given), strict=True):
            tangents_out[k] = tangent
    results = way.result, pytree.tree_unflatten(tangents_out, way.structure)
    return _as_outside((*results, way.aux) if has_aux else results)


class _Way:
    """A function at its arguments.  arguments: those that it is differentiated by, inputs: their tensors.  result: what
    it returns, outputs: the tensors of that.  aux: what it returns beside that.
    """

    def __init__(
        self, func: Callable[..., Any], args: Any, argnums: Argnums, has_aux: bool, kwargs: Mapping[str, Any] = EMPTY,
        forward: bool = False,
    ) -> None:  # fmt: skip
        given = args if argnums is None else chosen(args, argnums)
        with torch.enable_grad():
            own = pytree.tree_map(_own, given)
            leaves = [untransformed(leaf) for leaf in pytree.tree_leaves(own)]
            versions = [leaf._version for leaf in leaves]
            with _Inside(forward):
                result = func(*(own if argnums is None else with_chosen(args, own, argnums)), **kwargs)
            if versions != [leaf._version for leaf in leaves]:
                raise _refused(
                    "writes into its argument", "it is differentiated by what it was given", "clone it first"
                )
        self.aux = None
        if has_aux:
            if not (isinstance(result, tuple) and len(result) == 2):
                raise RuntimeError("with has_aux=True the function returns (output, aux)")
            result, self.aux = result
        self.arguments = own[0] if isinstance(argnums, int) else own
        self.inputs = pytree.tree_leaves(own)
        self.result = result
        self.outputs, self.structure = pytree.tree_flatten(result)

    def pulled(self, cotangents: Sequence[Tensor]) -> Any:
        """The product with the transposed Jacobian, in the places of the arguments."""
        with torch.enable_grad():
            found = gradients(self.outputs, self.inputs, cotangents)
        return pytree.tree_unflatten(found, pytree.tree_structure(self.arguments))


class _Inside(TorchFunctionMode):
    """Refuses what is another thing at a level of `torch.func` than here, where there is none."""

    def __init__(self, forward: bool) -> None:
        super().__init__()
        self.forward = forward

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.forward and func is SET_GRAD_ENABLED and not args[0]:
            raise _refused("turns gradients off", "forward mode goes on there, and reverse mode does not", "detach")
        if func in _OF_LEVELS and not is_library(sys._getframe(1).f_code.co_filename):
            raise _refused(*_OF_LEVELS[func])
        return func(*args, **(kwargs or {}))


_LEVEL = "that is a matter of the level of torch.func that it runs at, and a graph has none"
_OF_LEVELS = {
    torch.Tensor.requires_grad.__get__: ("asks whether a tensor requires a gradient", _LEVEL, "leave the question out"),  # type: ignore[attr-defined]
    torch.Tensor.data.__get__: ("reads .data of a tensor", _LEVEL, "take detach()"),  # type: ignore[attr-defined]
}


def _refused(what: str, why: str, fix: str) -> NotYetSupported:
    where = users_line(sys._getframe(1))
    return NotYetSupported(f"a function that torch.func differentiates {what}", where=where, why=why, fix=fix)


def _counted(argnums: Argnums, args: Sequence[Any]) -> Argnums:
    """From the first argument on."""
    if isinstance(argnums, tuple):
        return tuple(k + len(args) if -len(args) <= k < 0 else k for k in argnums)
    return argnums + len(args) if isinstance(argnums, int) and -len(args) <= argnums < 0 else argnums


def _own(tensor: Any) -> Tensor:
    """The same value, with a gradient of its own: of all samples, where a `vmap` runs over them, one each."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"torch.func differentiates by tensors, not by {type(tensor).__name__}")
    each = sliced_by_vmaps(tensor)
    if untransformed(each).requires_grad:
        alias: Tensor = torch.ops.aten.alias.default(each)
        return alias
    found = each.detach()
    with not_recorded(), no_functorch_levels(), without_functions():
        untransformed(found).requires_grad_()
    return found


def _leaves_like(tree: Any, given: Any) -> list[Tensor]:
    leaves, structure = pytree.tree_flatten(given)
    if structure != pytree.tree_structure(tree):
        raise RuntimeError(f"{structure} is given for {pytree.tree_structure(tree)}")
    return leaves


def _as_outside(tree: Any, learning: bool | None = None) -> Any:
    """Without gradients where the caller wants none."""
    if torch.is_grad_enabled() if learning is None else learning:
        return tree
    return pytree.tree_map_only(Tensor, Tensor.detach, tree)
