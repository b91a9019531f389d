"""Recurrences: the library's layers, and loops by hand."""

from __future__ import annotations

from fuzz.grammar.parameters import parameter
from fuzz.grammar.table import op
from fuzz.grammar.views import ranked
from fuzz.program import Misfit, Val, Writer

STEPS = {
    "tanh": "s = torch.tanh(F.linear(z, {u}) + F.linear(s, {v}))",
    "gate": "s = torch.sigmoid(F.linear(z, {u})) * s + torch.tanh(F.linear(s, {v}))",
    "average": "s = s * {a}.sigmoid() + F.linear(z, {u})",
    "cat": "s = torch.tanh(F.linear(torch.cat([z, s], -1), {c}))",
    "normed": "s = F.layer_norm(F.linear(z, {u}) + s, [{n}])",
}


@op("recurrent")
def loop(w: Writer, x: Val) -> Val:
    """A state that goes over the places of a sequence."""
    x = ranked(w, x, 3)
    t, i, n = x.sizes[1], x.sizes[2], w.pick("state", [2, 1, 3])
    if t > 5:
        raise Misfit("long")
    how = w.pick("how", list(STEPS))
    if how == "normed" and n == 1:
        raise Misfit("one feature")
    code = STEPS[how].replace("{n}", str(n))
    for letter, shape in (("u", [n, i]), ("v", [n, n]), ("a", [n]), ("c", [n, i + n])):
        if "{" + letter + "}" in code:
            code = code.replace("{" + letter + "}", parameter(w, shape, letter))
    learnt = w.flag("learnt start", 0.3)
    start = (
        f"{parameter(w, [n], 'start')}.expand({x.size(0)}, {n})" if learnt else f"{x.name}.new_zeros({x.size(0)}, {n})"
    )
    w.line(f"s, kept = {start}, []")
    w.line(f"for z in {x.name}.unbind(1):")
    w.line(f"    {code}")
    w.line("    kept.append(s)")
    if w.flag("last"):
        return w.emit("s", [x.sizes[0], n], 0, x.outer, x.inner)
    return w.emit("torch.stack(kept, 1)", [x.sizes[0], t, n], 0, x.outer, x.inner)


@op("recurrent")
def fast_weights(w: Writer, x: Val) -> Val:
    """Linear attention: a matrix for each sample that takes outer products."""
    x = ranked(w, x, 3)
    t, i, n = x.sizes[1], x.sizes[2], w.pick("state", [2, 1])
    if t > 5:
        raise Misfit("long")
    q, k = parameter(w, [n, i]), parameter(w, [n, i], "key")
    w.line(f"s, kept = {x.name}.new_zeros({x.size(0)}, {n}, {i}), []")
    w.line(f"for z in {x.name}.unbind(1):")
    w.line(f"    s = 0.5 * s + F.linear(z, {k}).unsqueeze(2) * z.unsqueeze(1)")
    w.line(f"    kept.append(torch.bmm(F.linear(z, {q}).unsqueeze(1), s).squeeze(1))")
    return w.emit("torch.stack(kept, 1)", x.sizes, 0, x.outer, x.inner)


@op("recurrent")
def layer(w: Writer, x: Val) -> Val:
    """nn.RNN, GRU and LSTM."""
    x = ranked(w, x, 3)
    t, i, n = x.sizes[1], x.sizes[2], w.pick("state", [2, 3])
    kind, first = w.pick("kind", ["RNN", "GRU", "LSTM"]), w.flag("batch first")
    both, layers = w.flag("bidirectional", 0.3), w.pick("layers", [1, 1, 2])
    if t > 4:
        raise Misfit("long")
    module = w.made(
        "rnn", f"nn.{kind}({i}, {n}, {layers}, batch_first={first}, bidirectional={both}, bias={w.flag('bias')})"
    )
    turn = "" if first else ".transpose(0, 1)"
    return w.emit(f"{module}({x.name}{turn})[0]{turn}", [x.sizes[0], t, n * (1 + both)], 0, x.outer, x.inner)
