"""The fallback: any op, by `vmap(vjp)` of that one op.  Always right, never the fastest, and named in the plan."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from psg_fx.algebra.arrange import samples_first
from psg_fx.algebra.network import BATCH, Leaf, Network
from psg_fx.algebra.site import Operand, Site, Value
from psg_fx.ops.in_other_ops import differentiated
from psg_fx.ops.of_users.autograd_function import differentiable
from psg_fx.ops.of_users.custom_call import custom_call
from psg_fx.ops.of_users.per_sample import for_each_sample
from psg_fx.program.reads.observe import observing_backward
from psg_fx.tensors import product

aten = torch.ops.aten


def fallback(site: Site, operand: Operand) -> Network:
    """Dense [b, p]: for each sample the VJP of the op as it acts on a batch of one.

    p is the operand, flattened.  Sizes in the op's arguments that depend on the batch size take their value at B = 1.
    """
    flat, spec = pytree.tree_flatten((site.args, site.kwargs), is_leaf=lambda v: isinstance(v, Value))
    values = tuple(dict.fromkeys(v for v in flat if isinstance(v, Value)))
    cotangents = tuple((k, c) for k, c in enumerate(site.cotangents) if c is not None)
    carried = tuple(v.samples for v in values)
    if operand.value.samples is not None:
        raise AssertionError(f"a parameter operand of {site.name} carries samples")
    target, numbers = _target(site), _numbers_of_samples(site)

    def build(*tensors: torch.Tensor) -> torch.Tensor:
        data, grads = tensors[: len(values)], tensors[len(values) :]
        rows = [samples_first(t, axis) if axis is not None else t for t, axis in zip(data, carried, strict=True)]
        grad_rows = [samples_first(g, c.samples) for g, (_, c) in zip(grads, cotangents, strict=True)]  # type: ignore[arg-type]
        dims = [0 if axis is not None else None for axis in carried]

        def one(*own: torch.Tensor) -> torch.Tensor:
            inputs, seeds = dict(zip(values, own[: len(values)], strict=True)), own[len(values) :]
            if numbers is not None:
                inputs[numbers] = inputs[numbers] % site.input(0).samples.inner  # type: ignore[union-attr]
            filled = [inputs[v] if isinstance(v, Value) else _at_one(v, site.batch) for v in flat]

            def call(p: torch.Tensor) -> tuple[torch.Tensor, ...]:
                args, kwargs = pytree.tree_unflatten(
                    [*filled[: operand.position], p, *filled[operand.position + 1 :]], spec
                )
                result = target(*args, **kwargs)
                results = [result] if isinstance(result, torch.Tensor) else pytree.tree_leaves(result)
                return tuple(results[k] for k, _ in cotangents)

            pull = torch.func.vjp(call, inputs[operand.value])[1]
            gradient: torch.Tensor = pull(tuple(seeds))[0]
            return gradient

        every = (*dims, *[0] * len(grad_rows))
        found = for_each_sample(one, every, (*rows, *grad_rows), site.op, site.where)
        return found.flatten(1) if found.ndim > 1 else found.unsqueeze(1)

    sources = (*(v.source for v in values), *(c.source for _, c in cotangents))
    leaf = Leaf(
        f"vjp({site.op})", sources, f"fallback {site.name} {operand.position}", (BATCH, "p"),
        (site.batch, product(operand.value.shape) * sympy.Integer(1)), dtype=operand.value.dtype, build=build,
    )  # fmt: skip
    return Network((leaf,), (BATCH, "p"))


def _target(site: Site) -> Any:
    """What is differentiated in place of the op, or the custom function as it acts on a batch of one."""
    call = custom_call(site.target)
    if call is None:
        return differentiated(site.target)
    shapes = [tuple(int(s.subs(site.batch, 1)) for s in v.shape) for v in site.args]
    asked = [any(o.value is v for o in site.operands) for v in site.args]
    used = [k for k, cotangent in enumerate(site.cotangents) if cotangent is not None]
    with observing_backward():
        return differentiable(call, shapes, [v.dtype for v in site.args], asked, used)


def _numbers_of_samples(site: Site) -> Value | None:
    """The indices along the samples of an op that writes rows, T·i + c of sample i with T rows: c in a batch of one."""
    if site.target in _ALONG:
        x, (along, index) = site.input(0), site.args[1:3]
        at_samples = x.samples is not None and along % len(x.shape) == x.samples.dim
        return index if at_samples and isinstance(index, Value) else None
    if site.target not in (aten.index_put.default, aten._unsafe_index_put.default):
        return None
    x, picks = site.input(0), site.args[1]
    at_samples = None if x.samples is None or x.samples.dim >= len(picks) else picks[x.samples.dim]
    return at_samples if isinstance(at_samples, Value) and at_samples.dtype is not torch.bool else None


_ALONG = tuple(
    getattr(packet, overload)
    for packet in (
        aten.index_fill, aten.index_add, aten.index_copy, aten.index_reduce, aten.scatter, aten.scatter_add,
        aten.scatter_reduce, aten.gather,
    )
    for overload in packet.overloads()
)  # fmt: skip
"""Ops of `(x, dim, index, ..)`, whose index counts along a dim."""


def _at_one(value: Any, batch: sympy.Symbol) -> Any:
    return int(value.subs(batch, 1)) if isinstance(value, sympy.Expr) else value
