"""Programs whose samples mix: there is no right answer but a refusal."""

from __future__ import annotations

from fuzz.grammar.losses import output
from fuzz.grammar.table import op
from fuzz.grammar.views import plain
from fuzz.program import Data, Misfit, Val, Writer

INSIDE = (
    "{x} - {x}.mean(0, keepdim=True)", "{x} - {x}.mean(0)", "{x}.softmax(0)", "{x}.cumsum(0)", "{x}.cumprod(0)",
    "{x}.logcumsumexp(0)", "{x}.cummax(0)[0]", "{x}.sort(0)[0]", "{x}.flip(0)", "{x}.roll(1, 0)",
    "{x} * {x}.amax(0)", "{x} + {x}[:1]", "{x} + {x}[0]", "{x} + {x}[-1]", "{x} / {x}.norm()", "{x} * {x}.sum()",
    "{x} * {x}.max()", "{x} * {x}.detach().mean()", "{x}[{x}.flatten(1).sum(1).argsort()]",
    "F.batch_norm({x}.reshape(b, 1, -1), None, None, training=True).reshape({x}.shape)",
    "{x}.reshape(b, -1).t().reshape({x}.shape)", "{x}.transpose(0, -1).reshape({x}.shape)",
    "torch.fft.fft({x}, dim=0).real", "F.normalize({x}, dim=0)",
    "({x}.reshape(b, -1) @ {x}.reshape(b, -1).t() @ {x}.reshape(b, -1)).reshape({x}.shape)",
    "torch.where({x} > {x}.median(), {x}, 0.5 * {x})",
    "{x} * {x}.reshape(b, -1).sum(1).softmax(0).reshape([b] + [1] * ({x}.ndim - 1))",
    "{x} + torch.cat([{x}[1:], {x}[:1]])", "{x} - {x}.reshape(-1).sort()[0][0]",
    "{x}.reshape(-1).cumsum(0).reshape({x}.shape)", "{x} * torch.arange(b).view([b] + [1] * ({x}.ndim - 1))",
    "{x}.scatter_add(0, torch.zeros_like({x}, dtype=torch.long), {x})",
    "{x} + {x}.index_select(0, torch.zeros(b, dtype=torch.long))",
    "torch.lerp({x}, {x}.mean(0).expand_as({x}), 0.3)", "{x} / (1 + {x}.var(0, correction=0))",
    "{x} * {x}.reshape(b, -1).sum(1).gt(0).sum()", "{x}.msort()", "{x} - {x}.logsumexp(0)",
    "torch.stack({x}.unbind(0)[::-1])", "F.dropout({x}, 0.0) + {x}.std(0, correction=0)",
    "{x} + {x}.gather(0, {x}.argsort(0))", "torch.einsum('b...,c...->b...', {x}, {x})",
)  # fmt: skip
LOSSES = (
    "((o - t) ** 2 / (o - t).detach().var(correction=0).add(0.1)).mean()", "F.mse_loss(o - o.mean(0), t)",
    "(o.t() @ o).square().mean()", "F.cross_entropy(o @ t.t(), torch.arange(o.shape[0]))",
    "((o - t).square().sum(1) * torch.arange(o.shape[0])).sum()", "(o.cumsum(0) * t).mean()",
    "(o * t.flip(0)).sum()", "(o.softmax(0) * t).sum()", "(o.sort(0)[0] - t).square().mean()",
    "(o - t)[0].square().sum()", "(o - t)[1:].square().sum() + o.sum()", "torch.cdist(o, o).square().mean()",
    "(o.sum(1) * t.sum()).mean()", "(o * t).sum(1).topk(1)[0].sum()", "(o[:, None] - o[None]).square().sum()",
)  # fmt: skip


@op("mixing")
def inside(w: Writer, x: Val) -> Val:
    """Between two layers."""
    x = plain(w, x)
    if x.ndim < 2:
        x = w.emit(f"{x.name}.unsqueeze(1)", [1, 1])
    w.mixes = True
    return w.like(x, w.pick("how", INSIDE))


@op("mixing loss")
def over_samples(w: Writer, x: Val) -> Val:
    """In the loss."""
    o = output(w, x)
    if o.ndim != 2:
        o = w.emit(f"{o.name}.reshape(b, {o.count})", [1, o.count])
    if o.count < 2:
        raise Misfit("one element")
    w.mixes, w.target = True, Data("t", o.sizes[1:])
    w.loss_lines = [f"return {w.pick('how', LOSSES)}"]
    return o
