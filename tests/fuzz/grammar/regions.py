"""What runs under `torch.no_grad()`, and writes into tensors that have no gradient of their own."""

from __future__ import annotations

from fuzz.grammar.table import op
from fuzz.program import Val, Writer

GIVEN_BACK = (
    "{x}.sin()", "{x}.double()", "+{x}", "{x}.to({x}.device)", "{x}.contiguous()", "F.dropout({x}, 0.5, False)",
    "torch.atleast_2d({x})", "{x}.type_as({x})", "{x}.flatten({d}, {d})", "{x}.reshape({x}.shape)", "{x}.real",
    "{x}.clone().mul_(0.5)", "{x}.float().double()", "{x}.view_as({x})", "torch.as_tensor({x})",
)  # fmt: skip
"""Ops that return their argument itself, where it is what they make of it, and some that do not."""
WRITES = (
    "{a}.copy_({x})", "{a}{0} = {x}{0}", "{a}.select({d}, 0).add_({x}.select({d}, {last}))",
    "{a}{tail} *= {x}{tail} + 2",
    "{a}.mT.add_({x}.mT.sin())", "torch.mul({x}, 2, out={a})", "{a} += {x}.sin() * {x}",
)  # fmt: skip
UNSEEN = (
    "for p, q in zip({a}.unbind({d}), {x}.unbind({d})): p.copy_(q)",
    "for p, q in zip({a}.chunk(2, {d}), {x}.chunk(2, {d})): p.add_(q)",
)  # fmt: skip
"""Writes into several views at once, which torch allows without gradients only."""


@op("region")
def without_gradients(w: Writer, x: Val) -> Val:
    """A value that is computed without gradients, beside the one that it is computed of."""
    t, d = w.fresh("t"), w.pick("dim", x.free)
    code = w.pick("how", GIVEN_BACK)
    w.rough |= "float" in code
    w.line("with torch.no_grad():")
    w.line(f"    {t} = " + code.replace("{x}", x.name).replace("{d}", str(d)))
    return w.like(x, f"{{x}} * {t} + {{x}}.sin()")


@op("region")
def filled(w: Writer, x: Val) -> Val:
    """A tensor without a gradient that is written into, in whole or in parts, with gradients or without."""
    a, d = w.fresh("a"), w.pick("dim", x.free)
    quiet = w.pick("quiet", [True, False])
    code = w.pick("how", (*WRITES, *UNSEEN) if quiet else [c for c in WRITES if "out=" not in c])
    if "mT" in code and x.ndim < 2:
        code = WRITES[0]
    before = ":, " * d
    parts = {
        "{a}": a, "{x}": x.name, "{d}": str(d), "{last}": str(x.sizes[d] - 1), "{0}": f"[{before}0]",
        "{tail}": f"[{before}{x.sizes[d] // 2}:]",
    }  # fmt: skip
    for key, text in parts.items():
        code = code.replace(key, text)
    w.line(f"{a} = torch.{w.pick('start', ['zeros_like', 'ones_like'])}({x.name})")
    w.line(f"with torch.set_grad_enabled({not quiet}):")
    w.line(f"    {code}")
    return w.like(x, f"({{x}} - {a}) * {{x}} + {a}")
