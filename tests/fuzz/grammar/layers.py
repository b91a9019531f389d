"""Layers: where parameters meet the samples."""

from __future__ import annotations

import math

from fuzz.grammar.parameters import parameter
from fuzz.grammar.table import op
from fuzz.grammar.views import plain, ranked
from fuzz.program import Misfit, Val, Writer

WIDTHS = [1, 2, 3, 4]
AFFINE = (
    "{x} * {p}", "{x} + {p}", "torch.where({x} > 0, {x}, {p} * {x})", "{x} * ({p} + {x}).tanh()", "{p} - {x}",
    "{x} / ({p}.square() + 1)", "torch.maximum({x}, {p})", "torch.addcmul({x}, {x}, {p})",
)  # fmt: skip


def bias(w: Writer, size: int) -> str:
    """A bias or none."""
    return parameter(w, [size], "bias") if w.flag("with bias", 0.7) else "None"


@op("layer")
def linear(w: Writer, x: Val) -> Val:
    """y[.., o] = Σ_i x[.., i] W[o, i] + bias[o]."""
    d = x.ndim - 1
    if d == x.dim:
        raise Misfit("samples last")
    i = x.sizes[-1]
    o = w.pick("out", [*WIDTHS, i, i])
    how = w.pick("how", ["F.linear", "right", "einsum", "left", "addmm"])
    if how in ("F.linear", "addmm"):
        weight, b = parameter(w, [o, i]), bias(w, o)
        if how == "F.linear" or x.ndim != 2 or b == "None":
            return w.resized(x, f"F.linear({{x}}, {weight}, {b})", d, o)
        return w.resized(x, f"torch.addmm({b}, {{x}}, {weight}.t())", d, o)
    if how == "right":
        return w.resized(x, f"{{x}} @ {parameter(w, [i, o])}", d, o)
    if how == "left":
        if x.ndim < 3 or x.dim == x.ndim - 2:
            raise Misfit("two dims")
        return w.resized(x, f"{parameter(w, [o, x.sizes[-2]])} @ {{x}}", d - 1, o)
    letters = "abcdef"[: x.ndim]
    return w.resized(
        x, f"torch.einsum('{letters},{letters[-1]}z->{letters[:-1]}z', {{x}}, {parameter(w, [i, o])})", d, o
    )


@op("layer")
def contraction(w: Writer, x: Val) -> Val:
    """An einsum over any dim, with other dims of the weight aligned."""
    d = w.pick("dim", x.free)
    letters, o = "abcdef"[: x.ndim], w.pick("out", WIDTHS)
    shared = [k for k in x.free if k != d and w.flag(f"shared {k}", 0.3)]
    weight = "".join(letters[k] for k in shared) + letters[d] + "z"
    shape = [*(x.sizes[k] for k in shared), x.sizes[d], o]
    out = letters.replace(letters[d], "z")
    return w.resized(x, f"torch.einsum('{letters},{weight}->{out}', {{x}}, {parameter(w, shape)})", d, o)


@op("layer")
def bilinear(w: Writer, x: Val) -> Val:
    """y[o] = Σ_ij x[i] W[o, i, j] z[j]."""
    if x.dim == x.ndim - 1:
        raise Misfit("samples last")
    i, o = x.sizes[-1], w.pick("out", WIDTHS[:2])
    return w.resized(x, f"F.bilinear({{x}}, {{x}}.sin(), {parameter(w, [o, i, i])}, {bias(w, o)})", x.ndim - 1, o)


@op("layer")
def affine(w: Writer, x: Val) -> Val:
    """A factor and a shift that have some of the dims of a sample."""
    dims = [d for d in x.free if w.flag(f"in {d}", 0.6)]
    shape = [x.sizes[d] if d in dims else 1 for d in range(x.ndim)]
    while len(shape) > 1 and shape[0] == 1 and w.flag(f"drop {len(shape)}", 0.5):
        shape = shape[1:]
    return w.like(x, w.pick("how", AFFINE).replace("{p}", parameter(w, shape)))


@op("layer")
def conv(w: Writer, x: Val) -> Val:
    """Convolutions of one, two and three dims, also transposed."""
    spatial = w.pick("dims", [1, 2, 3])
    x = ranked(w, x, spatial + 2)
    kind, c, o = w.pick("groups", ["one", "depthwise", "two"]), x.sizes[1], w.pick("out", WIDTHS[:3])
    groups = {"one": 1, "depthwise": c, "two": 2}[kind]
    if c % groups:
        raise Misfit("groups")
    o *= groups if kind != "one" else 1
    kernel = [w.pick(f"kernel {k}", [1, 2, 3]) for k in range(spatial)]
    stride, pad, dilation = w.pick("stride", [1, 2]), w.pick("padding", [0, 1]), w.pick("dilation", [1, 2])
    sizes, options = list(x.sizes[2:]), f"stride={stride}, padding={pad}, dilation={dilation}, groups={groups}"
    if w.flag("transpose", 0.3):
        extra = w.pick("output padding", [0, 1])
        out = [(s - 1) * stride - 2 * pad + dilation * (k - 1) + extra + 1 for s, k in zip(sizes, kernel, strict=True)]
        weight, name = parameter(w, [c, o // groups, *kernel]), f"conv_transpose{spatial}d"
        options += f", output_padding={extra}"
        if extra >= max(stride, dilation):
            raise Misfit("output padding")
    else:
        out = [(s + 2 * pad - dilation * (k - 1) - 1) // stride + 1 for s, k in zip(sizes, kernel, strict=True)]
        if any(s + 2 * pad < dilation * (k - 1) + 1 for s, k in zip(sizes, kernel, strict=True)):
            raise Misfit("window")
        weight, name = parameter(w, [o, c // groups, *kernel]), f"conv{spatial}d"
    if min(out) < 1:
        raise Misfit("empty")
    return w.emit(f"F.{name}({x.name}, {weight}, {bias(w, o)}, {options})", [x.sizes[0], o, *out], 0, x.outer, x.inner)


@op("layer")
def conv_module(w: Writer, x: Val) -> Val:
    """A convolution with another mode of padding."""
    x = ranked(w, x, 3)
    mode, o = w.pick("mode", ["zeros", "reflect", "replicate", "circular"]), w.pick("out", WIDTHS)
    if x.sizes[2] < 2:
        raise Misfit("short")
    module = w.made("conv", f"nn.Conv1d({x.sizes[1]}, {o}, 3, padding=1, padding_mode='{mode}')")
    return w.emit(f"{module}({x.name})", [x.sizes[0], o, x.sizes[2]], 0, x.outer, x.inner)


@op("layer")
def norm(w: Writer, x: Val) -> Val:
    """Layer, rms, group, instance and (frozen) batch norms."""
    how = w.pick("how", ["layer", "rms", "group", "instance", "batch"])
    if how in ("layer", "rms"):
        tail = w.pick("count", [k for k in (1, 2) if x.ndim - k > (x.dim or 0)])
        shape = list(x.sizes[x.ndim - tail :])
        if math.prod(shape) == 1:
            raise Misfit("one element")
        weight = parameter(w, shape) if w.flag("with weight", 0.7) else "None"
        shift = f", {parameter(w, shape, 'shift')}" if how == "layer" and w.flag("with shift") else ""
        return w.like(x, f"F.{how}_norm({{x}}, {shape}, {weight}{shift})")
    x = ranked(w, x, w.pick("rank", [3, 4]))
    c = x.sizes[1]
    if x.count // c < 2:
        raise Misfit("one element")
    weight, shift = parameter(w, [c]), parameter(w, [c], "shift")
    if how == "batch":
        mean, var = w.stat(c, "randn"), w.stat(c, "rand")
        return w.like(x, f"F.batch_norm({{x}}, {mean}, {var}, {weight}, {shift})")
    if how == "instance":
        return w.like(x, f"F.instance_norm({{x}}, weight={weight}, bias={shift})")
    groups = w.pick("groups", [g for g in (1, 2, c) if c % g == 0])
    return w.like(x, f"F.group_norm({{x}}, {groups}, {weight}, {shift})")


@op("layer")
def table(w: Writer, x: Val) -> Val:
    """Rows of a table, by ids or by what the data say."""
    x = plain(w, x)
    if x.ndim < 2:
        raise Misfit("no places")
    rows, width = w.pick("rows", [2, 3, 5]), w.pick("width", WIDTHS)
    ids = f"({x.name}.detach() * 3).long().remainder({rows})"
    if w.flag("given", 0.4):
        ids = w.given(x.sizes[1:], f"torch.randint({rows}, {{shape}})").name
    weight = parameter(w, [rows, width])
    code = w.pick(
        "how",
        [
            "F.embedding({i}, {p})",
            "{p}[{i}]",
            "F.embedding({i}, {p}, padding_idx=1)",
            "F.one_hot({i}, {n}).to({p}.dtype) @ {p}",
        ],
    )
    found = code.replace("{i}", ids).replace("{p}", weight).replace("{n}", str(rows))
    return w.emit(f"{found} * (1 + 0.1 * {x.name}.unsqueeze(-1))", [*x.sizes, width])


@op("layer")
def token(w: Writer, x: Val) -> Val:
    """A learnt row put in front."""
    x = plain(w, x)
    if x.ndim < 2:
        raise Misfit("no places")
    shape = [1, *x.sizes[2:]]
    row = parameter(w, shape)
    sizes = ", ".join(["b", *map(str, shape)])
    return w.emit(f"torch.cat([{row}.expand({sizes}), {x.name}], 1)", [1, x.sizes[1] + 1, *x.sizes[2:]])


@op("layer")
def scan_with(w: Writer, x: Val) -> Val:
    """An op of another kind that reads a parameter: prelu, distances, attention to learnt keys, experts."""
    if x.dim is None or x.dim == x.ndim - 1:
        raise Misfit("samples last")
    n = x.sizes[-1]
    how = w.pick("how", ["prelu", "keys", "distance", "solve", "cumsum", "experts"])
    d = x.ndim - 1
    if how == "prelu":
        if x.ndim < 2 or x.dim == 1:
            raise Misfit("no channels")
        return w.like(x, f"F.prelu({{x}}, {parameter(w, [x.sizes[1]])})")
    if how == "keys":
        keys = parameter(w, [3, n])
        return w.like(x, f"({{x}} @ {keys}.T).softmax(-1) @ {keys}")
    if how == "distance":
        keys = parameter(w, [3, n])
        return w.resized(x, f"({{x}}.unsqueeze(-2) - {keys}).square().sum(-1)", d, 3)
    if how == "solve":
        matrix = f"torch.eye({n}, dtype={{x}}.dtype) * 3 + {parameter(w, [n, n])}"
        return w.like(x, f"torch.linalg.solve({matrix}, {{x}}.unsqueeze(-1)).squeeze(-1)")
    if how == "cumsum":
        return w.like(x, f"({{x}} * {parameter(w, [n])}).cumsum(-1)")
    x = plain(w, x)
    experts = parameter(w, [2, n, n])
    chosen = f"({x.name}.detach().flatten(1).cumsum(1).sum(1) > 0).long()"
    return w.like(x, f"torch.einsum('b...i,bij->b...j', {{x}}, {experts}[{chosen}])")
