"""The derivatives of `torch.func` in a model or loss: `grad`, `vjp`, `jvp`, `jacrev`, `jacfwd`, `hessian`.

Torch has a level of autograd for each, whose tensors no trace follows.  What they compute is what `torch.autograd.grad`
does, which a capture knows as an op (`own_gradients.py`): of values that are the function's arguments, and nothing else
is, so that what the function reads besides is constant.  A product with the Jacobian is the gradient of a product with
its transpose, which is linear in what it is multiplied by: J t = d(Jᵀ u)/du t.  Under `vmap` that op has a rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.torch_private.derivatives import chosen, derivatives_by, with_chosen
from psg_fx.torch_private.modes import no_functorch_levels, not_recorded, untransformed, without_functions
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
    way = _Way(func, args, argnums, has_aux, kwargs)
    if not isinstance(way.result, Tensor) or way.result.dim():
        found = f"one of shape {tuple(way.result.shape)}" if isinstance(way.result, Tensor) else type(way.result)
        raise RuntimeError(f"torch.func.grad takes a function of which the result is a scalar tensor, not {found}")
    derivative = way.pulled([ones(way.result)])
    return _as_outside((derivative, (way.result, way.aux) if has_aux else way.result))


def _vjp(func: Callable[..., Any], *primals: Any, argnums: Argnums = None, has_aux: bool = False) -> Any:
    way = _Way(func, primals, argnums, has_aux)

    def pulled(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        return _as_outside(way.pulled(_leaves_like(way.result, cotangents)), create_graph)

    result = _as_outside(way.result)
    return (result, pulled, _as_outside(way.aux)) if has_aux else (result, pulled)


def _jvp(
    func: Callable[..., Any], primals: Any, tangents: Any, argnums: Argnums, *, strict: bool = False, has_aux: bool
) -> Any:
    way = _Way(func, primals, argnums, has_aux)
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
        self, func: Callable[..., Any], args: Any, argnums: Argnums, has_aux: bool, kwargs: Mapping[str, Any] = EMPTY
    ) -> None:
        given = args if argnums is None else chosen(args, argnums)
        with torch.enable_grad():
            own = pytree.tree_map(_own, given)
            result = func(*(own if argnums is None else with_chosen(args, own, argnums)), **kwargs)
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


def _own(tensor: Any) -> Tensor:
    """The same value, with a gradient of its own."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"torch.func differentiates by tensors, not by {type(tensor).__name__}")
    if untransformed(tensor).requires_grad:
        alias: Tensor = torch.ops.aten.alias.default(tensor)
        return alias
    found = tensor.detach()
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
