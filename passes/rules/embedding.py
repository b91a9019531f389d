"""Embedding: rows of a table picked by integer ids."""

from __future__ import annotations

import torch

from psg_fx.network import Leaf, Network, OneHot
from psg_fx.rules import Arrangement, network, rule
from psg_fx.sites import Site

aten = torch.ops.aten


@rule(aten.embedding.default, params={"weight": 0})
def embedding(site: Site) -> dict[str, Network | None]:
    """y[b,t,:] = W[ids[b,t],:]

    weight: onehot(ids)[b,t,v] ȳ[b,t,d] -> [b,v,d]; rows with ids = padding_idx have no gradient.
    """
    weight, ids, ybar = site.input(0), site.input(1), site.cotangent
    padding = int(site.arg(2, "padding_idx", -1))
    if site.arg(4, "sparse", False) or site.arg(3, "scale_grad_by_freq", False):
        return {}
    plan, rows = Arrangement.of(ids, ("b", "t*")), Arrangement.of(ybar, ("b", "t*", "d"))
    if plan is None or rows is None:
        return {}
    classes = int(weight.shape[0])
    hot = Leaf(
        "onehot(ids)", (ids.name,), f"arrange {plan}", ("b", "t", "v"), (*plan.sizes, weight.shape[0]),
        OneHot(classes), ybar.dtype, plan,
    )  # fmt: skip
    if padding < 0:
        return {"weight": network("b t v, b t* d -> b v d", hot, ybar)}

    def masked(index: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return rows(gradient) * (plan(index) != padding).unsqueeze(-1)

    kept = Leaf(
        "ȳ", (ids.name, ybar.name), f"masked {padding} {plan} {rows}", ("b", "t", "d"), rows.sizes, dtype=ybar.dtype,
        build=masked,
    )  # fmt: skip
    return {"weight": network("b t v, b t d -> b v d", hot, kept)}
