"""Scans, sorts and reductions along a dim without samples."""

from __future__ import annotations

from fuzz.grammar.table import op
from fuzz.program import Val, Writer

SCANS = (
    "{x}.cumsum({d})", "{x}.cumprod({d})", "{x}.logcumsumexp({d})", "{x}.cummax({d})[0]", "{x}.cummin({d})[0]",
    "{x}.flip({d}).cumsum({d}).flip({d})", "{x}.softmax({d})", "{x}.log_softmax({d})", "F.softmin({x}, {d})",
    "F.normalize({x}, dim={d})", "{x}.sort({d})[0]", "{x}.sort({d}, descending=True)[0]",
    "{x} - {x}.mean({d}, keepdim=True)",
    "{x} / (1 + {x}.var({d}, correction=0, keepdim=True))", "torch.fft.fft({x}, dim={d}).real",
    "torch.fft.fft({x}, dim={d}).imag", "torch.fft.irfft(torch.fft.rfft({x}, dim={d}), n={n}, dim={d})",
    "{x} * ({x} == {x}.amax({d}, keepdim=True))", "{x}.softmax({d}).cumsum({d}).log1p()",
    "torch.special.log_softmax({x}, {d})",
    "{x}.cumsum({d}).movedim({d}, -1).div(torch.arange(1, {n} + 1)).movedim(-1, {d})",
)  # fmt: skip

REDUCTIONS = (
    "{x}.mean({d})", "{x}.sum({d})", "{x}.amax({d})", "{x}.amin({d})", "{x}.max({d})[0]", "{x}.min({d})[0]",
    "{x}.prod({d})", "{x}.logsumexp({d})", "{x}.norm(dim={d})", "torch.linalg.vector_norm({x}, 3, {d})",
    "{x}.median({d})[0]", "{x}.kthvalue(1, {d})[0]", "{x}.var({d}, correction=0)", "{x}.square().mean({d})",
    "{x}.quantile(0.3, dim={d})", "{x}.std({d}, correction=0)", "{x}.nansum({d})", "torch.trapezoid({x}, dim={d})",
    "{x}.mode({d})[0]", "{x}.aminmax(dim={d})[1]",
)  # fmt: skip


@op("along")
def scan(w: Writer, x: Val) -> Val:
    """The shape stays."""
    d = w.pick("dim", x.free)
    code = w.pick("how", SCANS).replace("{d}", str(d)).replace("{n}", str(x.sizes[d]))
    return w.like(x, code)


@op("along")
def reduce(w: Writer, x: Val) -> Val:
    """The dim goes, or stays with size one."""
    d = w.pick("dim", x.free)
    code = w.pick("how", REDUCTIONS).replace("{d}", str(d))
    if w.flag("keep"):
        return w.resized(x, f"({code}).unsqueeze({d})", d, 1)
    return w.without(x, code, d)


@op("along")
def top(w: Writer, x: Val) -> Val:
    """The largest of a dim."""
    d = w.pick("dim", x.free)
    k = w.pick("k", list(range(1, x.sizes[d] + 1)))
    return w.resized(x, f"{{x}}.topk({k}, {d}, largest={w.flag('largest')})[0]", d, k)


@op("along")
def several(w: Writer, x: Val) -> Val:
    """All dims but that of the samples at once."""
    if len(x.free) < 2:
        return w.like(x, "{x} * 1.5")
    dims = tuple(x.free)
    code = w.pick("how", ["{x} - {x}.mean({d}, keepdim=True)", "{x} / (1 + {x}.square().sum({d}, keepdim=True))",
                          "{x} * {x}.amax({d}, keepdim=True)", "{x} - torch.logsumexp({x}, {d}, keepdim=True)",
                          "{x} / (1 + {x}.std({d}, correction=0, keepdim=True))"])  # fmt: skip
    return w.like(x, code.replace("{d}", str(dims)))


@op("along")
def differences(w: Writer, x: Val) -> Val:
    """Neighbours subtracted, gates, pairs."""
    d = w.pick("dim", x.free)
    n = x.sizes[d]
    how = w.pick("how", ["diff", "glu"])
    if how == "diff" and n > 1:
        return w.resized(x, f"{{x}}.diff(dim={d})", d, n - 1)
    if n % 2 == 0:
        return w.resized(x, f"F.glu({{x}}, {d})", d, n // 2)
    return w.like(x, f"{{x}} - {{x}}.roll(1, {d})")
