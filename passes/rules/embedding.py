"""Embedding and its kin: rows or elements of a table picked by integer ids."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from psg_fx.algebra.arrange import Arrangement, network, onehot
from psg_fx.algebra.network import BATCH, Leaf, Network
from psg_fx.algebra.rule import rule
from psg_fx.algebra.site import Site, Value
from psg_fx.tensors import product

aten = torch.ops.aten


@rule(aten.embedding.default, params={"weight": 0})
def embedding(site: Site) -> dict[str, Network | None]:
    """y[b,t,:] = W[ids[b,t],:]

    weight: onehot(ids)[b,t,v] ȳ[b,t,d] -> [b,v,d]; rows with ids = padding_idx have no gradient.

    `sparse` says how autograd would store the gradient, not what it is.
    """
    weight, ids, ybar = site.input(0), site.input(1), site.cotangent
    padding = int(site.arg(2, "padding_idx", -1))
    if site.arg(3, "scale_grad_by_freq", False):
        return {}
    plan, rows = Arrangement.of(ids, ("b", "t*")), Arrangement.of(ybar, ("b", "t*", "d"))
    if plan is None or rows is None:
        return {}
    hot = onehot(ids, plan, weight.shape[0], ybar.dtype)
    if padding < 0:
        return {"weight": network("b t v, b t* d -> b v d", hot, ybar)}

    def masked(index: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return rows(gradient).masked_fill((plan(index) == padding).unsqueeze(-1), 0.0)  # also where it is no number

    kept = Leaf(
        "ȳ", (ids.source, ybar.source), f"masked {padding} {plan} {rows}", ("b", "t", "d"), rows.sizes,
        dtype=ybar.dtype, build=masked,
    )  # fmt: skip
    return {"weight": network("b t v, b t d -> b v d", hot, kept)}


@rule(aten.index.Tensor, params={"weight": 0})
def index(site: Site) -> dict[str, Network | None]:
    """y[p,t,q] = W[p, ids[b,t], q], one tensor of integers among the indices: an embedding along that dim.

    weight: onehot(ids)[b,t,v] ȳ[b,t,p,q] -> [b,p,v,q]; negative ids count from the end
    """
    given = [(dim, ids) for dim, ids in enumerate(site.args[1]) if ids is not None]
    if len(given) != 1:
        return {}
    return {"weight": rows_along(site, *given[0])}


@rule(aten.index_select.default, params={"weight": 0})
def index_select(site: Site) -> dict[str, Network | None]:
    """y[p,b,q] = W[p, ids[b], q]: onehot(ids)[b,v] ȳ[b,p,q] -> [b,p,v,q]."""
    return {"weight": rows_along(site, int(site.args[1]), site.input(2))}


@rule(aten.gather.default, params={"table": 0})
def gather(site: Site) -> dict[str, Network | None]:
    """y[i.., j, k..] = W[i.., ids[i.., j, k..], k..] along dim: elements of W, flattened, at places that ids give.

    table: onehot(places(ids))[b,t,v] ȳ[b,t] -> [b,v] for v over all of W.
    """
    table, dim, ids = site.input(0), int(site.args[1]), site.input(2)
    shape = [int(size) for size in table.shape]

    def places(index: torch.Tensor) -> torch.Tensor:
        dims = range(max(len(shape), 1))
        steps = [math.prod(shape[d + 1 :]) for d in dims]
        found = index * steps[dim]
        for d in dims:
            if d != dim % len(dims) and index.shape[d] != 1:
                wide = [-1 if k == d else 1 for k in dims]
                found = found + steps[d] * torch.arange(index.shape[d], device=index.device).view(wide)
        return found

    return {"table": elements_at(site, ids, f"gather {dim} {shape}", places)}


@rule(aten.take.default, params={"table": 0})
def take(site: Site) -> dict[str, Network | None]:
    """y[b,t] = W.flatten()[ids[b,t]]: onehot(ids)[b,t,v] ȳ[b,t] -> [b,v]; negative ids count from the end."""
    ids, classes = site.input(1), int(product(site.input(0).shape))

    def places(index: torch.Tensor) -> torch.Tensor:
        return torch.where(index < 0, index + classes, index)

    return {"table": elements_at(site, ids, f"take {classes}", places)}


def elements_at(site: Site, ids: Value, recipe: str, places: Callable[[torch.Tensor], torch.Tensor]) -> Network | None:
    """The gradient of W (argument 0, flattened), of which places(ids), shaped as ids, are picked."""
    table, ybar = site.input(0), site.cotangent
    plan, rows = Arrangement.of(ids, (BATCH, "t*")), Arrangement.of(ybar, (BATCH, "t*"))
    if plan is None or rows is None or ids.samples != ybar.samples:
        return None
    hot = onehot(ids, plan, product(table.shape), ybar.dtype, recipe=recipe, places=places)
    return Network((hot, rows.leaf(ybar)), (BATCH, "v"))


def rows_along(site: Site, dim: int, ids: Value) -> Network | None:
    """The gradient of W along whose `dim` ids pick."""
    weight, ybar = site.input(0), site.cotangent
    dim = dim % max(weight.ndim, 1)
    axis, own = ybar.samples, ids.samples
    if own is None or axis is None or ids.dtype not in (torch.int64, torch.int32):
        return None
    if (axis.dim, axis.outer, axis.inner) != (own.dim + dim, own.outer, own.inner):
        return None
    classes = int(weight.shape[dim])
    middle = tuple(range(dim, dim + ids.ndim))
    plan = Arrangement.grouped(ids, {BATCH: (own.dim,), "t": tuple(d for d in range(ids.ndim) if d != own.dim)})
    rows = Arrangement.grouped(ybar, {
        BATCH: (axis.dim,), "t": tuple(d for d in middle if d != axis.dim), "p": tuple(range(dim)),
        "q": tuple(range(dim + ids.ndim, ybar.ndim)),
    })  # fmt: skip

    def positive(value: torch.Tensor) -> torch.Tensor:
        return torch.where(value < 0, value + classes, value)

    hot = onehot(ids, plan, weight.shape[dim], ybar.dtype, recipe=f"positive {classes}", places=positive)
    return Network((hot, rows.leaf(ybar)), (BATCH, "p", "v", "q"))
