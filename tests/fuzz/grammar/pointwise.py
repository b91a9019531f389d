"""Elementwise ops, of one value or of two."""

from __future__ import annotations

from fuzz.grammar.table import op
from fuzz.program import Val, Writer

UNARY = (
    "{x}.tanh()", "{x}.sigmoid()", "F.relu({x})", "F.gelu({x})", "F.silu({x})", "F.elu({x})", "F.softplus({x})",
    "{x}.sin()", "{x}.abs()", "{x}.square()", "torch.exp(-{x}.square())", "{x}.clamp(-0.5, 0.7)",
    "F.leaky_relu({x}, 0.1)", "{x}.pow(3)", "torch.where({x} > 0, {x}, 0.1 * {x}.sin())",
    "{x}.masked_fill({x} > 0.5, 0.25)", "({x}.square() + 1).sqrt()", "{x}.atan()", "{x} / (1 + {x}.abs())",
    "F.hardtanh({x})", "F.mish({x})", "F.dropout({x}, 0.0)", "{x} * {x}.detach().sigmoid()", "{x}.clone()", "-{x}",
    "2 - {x}", "{x}.clamp_min(0.1).log()", "torch.addcmul({x}, {x}, {x}, value=0.5)", "{x}.nan_to_num()",
    "F.hardswish({x})", "{x}.lerp({x}.sin(), 0.3)", "{x}.erf()", "{x}.sign() * {x}.square()",
    "{x}.contiguous().relu_()", "{x}.clone().mul_(0.5).add_(0.1)", "{x}.float().double()",
    "torch.ones_like({x}) * {x}", "{x}.cos()",
)  # fmt: skip

BINARY = (
    "{x} + {y}", "{x} * {y}", "{x} - {y}.tanh()", "torch.maximum({x}, {y})",
    "torch.where({x} > {y}, {x}, {y} * 0.5)", "{x} / (1 + {y}.square())", "torch.lerp({x}, {y}, 0.3)",
    "torch.hypot({x}, {y} + 3)", "torch.atan2({x}, {y}.abs() + 1)", "torch.addcdiv({x}, {x}, {y}.square() + 1)",
    "{x}.copysign({y})", "torch.logaddexp({x}, {y})",
)  # fmt: skip


@op("point")
def unary(w: Writer, x: Val) -> Val:
    """y = f(x)."""
    code = w.pick("how", UNARY)
    w.rough |= "float" in code
    return w.like(x, code)


@op("point")
def binary(w: Writer, x: Val) -> Val:
    """y = f(x, z), z a value before of the same shape."""
    y = w.operand("other", lambda v: (v.sizes, v.dim, v.outer, v.inner) == (x.sizes, x.dim, x.outer, x.inner))
    return w.like(x, w.pick("how", BINARY).replace("{y}", y.name))


@op("point")
def join(w: Writer, x: Val) -> Val:
    """Two values beside one another."""
    d = w.pick("dim", x.free)
    y = w.operand("other", lambda v: v.ndim == x.ndim and (v.dim, v.outer, v.inner) == (x.dim, x.outer, x.inner)
                  and all(v.sizes[k] == x.sizes[k] for k in range(x.ndim) if k != d))  # fmt: skip
    return w.resized(x, f"torch.cat([{{x}}, {y.name}], {d})", d, x.sizes[d] + y.sizes[d])


@op("point")
def broadcast(w: Writer, x: Val) -> Val:
    """A factor that differs along one dim and that all samples share."""
    d = w.pick("dim", x.free)
    shape = [x.sizes[k] if k == d else 1 for k in range(x.ndim)]
    code = f"torch.arange({x.sizes[d]}, dtype={x.name}.dtype).view({shape})"
    return w.like(
        x,
        w.pick(
            "how", ["{x} + {t}", "{x} * ({t} > 0)", "{x}.masked_fill({t} > 1, 0.5)", "torch.where({t} > 0, {x}, 0.0)"]
        ).replace("{t}", code),
    )


@op("point")
def counted(w: Writer, x: Val) -> Val:
    """The number of samples in the forward pass: 1 for a sample alone."""
    w.counts = True
    return w.like(
        x,
        w.pick("how", ["{x} / b", "{x} * b", "{x} + 1.0 / (1 + b)", "{x} / len({x})" if x.plain else "{x} * (b + 1)"]),
    )


@op("point")
def given(w: Writer, x: Val) -> Val:
    """A further input, a mask or a weight for every element of a sample."""
    if not x.plain:
        return w.like(x, "{x} * 0.5")
    kind = w.pick("kind", ["float", "mask", "row"])
    if kind == "row":
        other = w.given(())
        return w.like(x, f"{{x}} * {other.name}.view([b] + [1] * {x.ndim - 1})")
    if kind == "float":
        return w.like(x, f"{{x}} * {w.given(x.sizes[1:]).name}")
    mask = w.given(x.sizes[1:], "torch.rand({shape}) < 0.7")
    return w.like(
        x,
        w.pick("how", ["{x} * {m}", "{x}.masked_fill({m}, 0.0)", "torch.where({m}, {x}, {x}.sin())"]).replace(
            "{m}", mask.name
        ),
    )
