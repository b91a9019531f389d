"""Embedding: rows of a table picked by integer ids."""

from __future__ import annotations

import torch

from psg_fx.network import BATCH, Leaf, Network, OneHot
from psg_fx.rules import Arrangement, network, rule
from psg_fx.sites import Site, Value

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
    classes = int(weight.shape[0])
    hot = Leaf(
        "onehot(ids)", (ids.source,), f"arrange {plan}", ("b", "t", "v"), (*plan.sizes, weight.shape[0]),
        OneHot(classes), ybar.dtype, plan,
    )  # fmt: skip
    if padding < 0:
        return {"weight": network("b t v, b t* d -> b v d", hot, ybar)}

    def masked(index: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return rows(gradient) * (plan(index) != padding).unsqueeze(-1)

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
        return plan(torch.where(value < 0, value + classes, value))

    hot = Leaf(
        "onehot(ids)", (ids.source,), f"positive {classes} {plan}", (BATCH, "t", "v"), (*plan.sizes, weight.shape[dim]),
        OneHot(classes), ybar.dtype, positive,
    )  # fmt: skip
    grad = Leaf("ȳ", (ybar.source,), f"arrange {rows}", rows.axes, rows.sizes, dtype=ybar.dtype, build=rows)
    return Network((hot, grad), (BATCH, "p", "v", "q"))
