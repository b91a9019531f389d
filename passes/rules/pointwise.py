"""Elementwise ops, `expand`, and the scales of normalisations: the parameter broadcasts over the samples."""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch
from torch.utils import _pytree as pytree

from psg_fx.algebra.arrange import Arrangement
from psg_fx.algebra.network import Leaf, Network
from psg_fx.algebra.rule import class_rule, rule
from psg_fx.algebra.site import Site, Value
from psg_fx.op_table import POINTWISE

aten = torch.ops.aten


def broadcast_network(
    site: Site, parameter: tuple[sympy.Expr, ...], label: str, recipe: str, sources: tuple[Value, ...],
    gradient: Callable[..., torch.Tensor], at: int | None = None,
) -> Network | None:  # fmt: skip
    """The gradient of a parameter that broadcasts over ȳ, from `gradient(*sources)`, shaped like ȳ.

    e[b,t,d] -> [b,d]: dims of ȳ along which the parameter has size 1, or which it lacks, are summed.  The parameter's
    dims are matched with those of ȳ from the right, or starting at dim `at`.
    """
    ybar = site.cotangent
    offset = ybar.ndim - len(parameter) if at is None else at
    kept: list[int] = []
    for dim, size in enumerate(ybar.shape):
        own = parameter[dim - offset] if 0 <= dim - offset < len(parameter) else sympy.Integer(1)
        if own not in (1, size) or (ybar.samples is not None and dim == ybar.samples.dim and own != 1):
            return None
        if own != 1:
            kept.append(dim)
    plan = Arrangement.keeping(ybar, tuple(kept))
    read = tuple(v.source for v in sources)

    def build(*tensors: torch.Tensor) -> torch.Tensor:
        return plan(gradient(*tensors))

    leaf = Leaf(label, read, f"{recipe} {plan}", plan.axes, plan.sizes, dtype=ybar.dtype, build=build)
    return Network((leaf,), tuple(axis for axis in plan.axes if axis != "t"))


def summed(site: Site, parameter: tuple[sympy.Expr, ...], at: int | None = None) -> Network | None:
    """The gradient of a parameter that is added: ȳ, summed over what it broadcasts along (see `broadcast_network`)."""
    return broadcast_network(site, parameter, "ȳ", "ȳ", (site.cotangent,), lambda g: g, at)


@class_rule(POINTWISE)
def pointwise(site: Site, position: int) -> Network | None:
    """Y = f(x, p, ..) element by element, p broadcast: e = ȳ ∂f/∂p at every element, then e[b,t,d] -> [b,d].

    ∂f/∂p comes from autograd on the op itself with p expanded to y's shape, so one rule covers every such op.
    """
    if site.target is aten.prelu.default:  # its weight lies along the channels, and does not broadcast
        return None
    operand = next(o for o in site.operands if o.position == position)
    if operand.value.samples is not None or len(site.cotangents) != 1:
        return None
    ybar = site.cotangent
    flat, spec = pytree.tree_flatten((site.args, site.kwargs), is_leaf=lambda v: isinstance(v, Value))
    values = tuple(v for v in flat if isinstance(v, Value))
    if any(isinstance(v, sympy.Expr) for v in flat):
        return None
    if site.target.overloadpacket is aten.add and "alpha" not in site.kwargs:
        return summed(site, operand.value.shape)

    def gradient(*tensors: torch.Tensor) -> torch.Tensor:
        *arguments, cotangent = tensors
        rest = iter(arguments)
        filled = [next(rest).detach() if isinstance(v, Value) else v for v in flat]
        expanded = filled[position].expand(cotangent.shape).detach().requires_grad_()
        filled[position] = expanded
        args, kwargs = pytree.tree_unflatten(filled, spec)
        with torch.enable_grad():
            result = site.target(*args, **kwargs)
        (found,) = torch.autograd.grad(result, expanded, cotangent)
        return found

    recipe = f"pointwise {site.target} {position} {['·' if isinstance(v, Value) else v for v in flat]} {spec}"
    return broadcast_network(site, operand.value.shape, "x∘ȳ", recipe, (*values, ybar), gradient)


@rule(aten.expand.default, params={"p": 0})
def expand(site: Site) -> dict[str, Network | None]:
    """y[b,t,d] = p[d]: ȳ[b,t,d] -> [b,d]."""
    return {"p": summed(site, site.input(0).shape)}


@rule(aten.masked_fill.Tensor, params={"value": 2})
def masked_fill(site: Site) -> dict[str, Network | None]:
    """Y = value where mask, else x, with value of no dims: mask[b,t] ȳ[b,t] -> [b]."""
    ybar, mask = site.cotangent, site.input(1)
    return {"value": broadcast_network(site, (), "mask∘ȳ", "masked", (mask, ybar), lambda m, g: torch.where(m, g, 0.0))}


@rule(aten.fill.Tensor, params={"value": 1})
def fill(site: Site) -> dict[str, Network | None]:
    """Y = value everywhere, with value of no dims: ȳ[b,t] -> [b]."""
    return {"value": summed(site, ())}


def _affine(
    site: Site, parameter: tuple[sympy.Expr, ...], normalized: Callable[[torch.Tensor], torch.Tensor], recipe: str,
    at: int | None = None,
) -> dict[str, Network | None]:  # fmt: skip
    """Y = x̂ w + bias.  w: x̂[b,t,d] ȳ[b,t,d] -> [b,d];  bias: ȳ[b,t,d] -> [b,d]."""
    sources = (site.input(0), site.cotangent)
    weight = broadcast_network(site, parameter, "x̂∘ȳ", recipe, sources, lambda v, g: normalized(v) * g, at)
    return {"weight": weight, "bias": summed(site, parameter, at)}


@rule(aten.layer_norm.default, params={"weight": 2, "bias": 3})
def layer_norm(site: Site) -> dict[str, Network | None]:
    """Y = x̂ w + bias over the last dims (Ba et al. 2016, arXiv:1607.06450)."""
    shape = [int(s) for s in site.args[1]]
    eps = float(site.arg(4, "eps", 1e-5))
    return _affine(
        site, site.input(0).shape[-len(shape) :], lambda v: aten.layer_norm(v, shape, None, None, eps),
        f"layer_norm {shape} {eps}",
    )  # fmt: skip


@rule(aten.rms_norm.default, params={"weight": 2})
def rms_norm(site: Site) -> dict[str, Network | None]:
    """Y = x / rms(x) · w over the last dims (Zhang, Sennrich 2019, arXiv:1910.07467)."""
    shape = [int(s) for s in site.args[1]]
    eps = site.arg(3, "eps", None)
    parameter = site.input(0).shape[-len(shape) :]
    found = _affine(site, parameter, lambda v: aten.rms_norm(v, shape, None, eps), f"rms {shape} {eps}")
    return {"weight": found["weight"]}


@rule(aten.group_norm.default, params={"weight": 2, "bias": 3})
def group_norm(site: Site) -> dict[str, Network | None]:
    """Y = x̂ w + bias per channel (Wu, He 2018, arXiv:1803.08494)."""
    groups, eps = int(site.args[1]), float(site.arg(4, "eps", 1e-5))
    return _affine(
        site, site.input(0).shape[1:2], lambda v: aten.group_norm(v, groups, None, None, eps),
        f"group {groups} {eps}", 1,
    )  # fmt: skip


@rule(aten.instance_norm.default, params={"weight": 1, "bias": 2})
def instance_norm(site: Site) -> dict[str, Network | None]:
    """Y = x̂ w + bias per channel, x̂ by each sample's own statistics (Ulyanov et al. 2016, arXiv:1607.08022)."""
    own_statistics, eps = bool(site.args[5]), float(site.args[7])
    if not own_statistics:
        return {}
    return _affine(
        site, site.input(0).shape[1:2],
        lambda v: aten.instance_norm(v, None, None, None, None, True, 0.0, eps, False), f"instance {eps}", 1,
    )  # fmt: skip


@rule(aten._native_batch_norm_legit_no_training.default, params={"weight": 1, "bias": 2})
def batch_norm_eval(site: Site) -> dict[str, Network | None]:
    """Y = x̂ w + bias per channel, x̂ = (x - mean) / √(var + eps) by running statistics."""
    x, mean, variance, ybar = site.input(0), site.args[3], site.args[4], site.cotangent
    eps = float(site.args[6])

    def gradient(v: torch.Tensor, m: torch.Tensor, s: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        shape = [-1, *[1] * (v.ndim - 2)]
        return (v - m.reshape(shape)) * (s + eps).rsqrt().reshape(shape) * g

    channels = x.shape[1:2]
    weight = broadcast_network(site, channels, "x̂∘ȳ", f"batch {eps}", (x, mean, variance, ybar), gradient, 1)
    return {"weight": weight, "bias": summed(site, channels, 1)}


@rule(aten.prelu.default, params={"weight": 1})
def prelu(site: Site) -> dict[str, Network | None]:
    """Y = max(x, 0) + w min(x, 0), one w for all or one per channel (He et al. 2015, arXiv:1502.01852)."""
    x, weight, ybar = site.input(0), site.input(1), site.cotangent
    per_channel = weight.ndim == 1 and weight.shape[0] != 1 and x.ndim > 1
    parameter = weight.shape if per_channel else ()

    def gradient(v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return torch.where(v > 0, 0.0, v * g)  # where v > 0, also where ȳ is no number

    return {"weight": broadcast_network(site, parameter, "x∘ȳ", "prelu", (x, ybar), gradient, 1)}
