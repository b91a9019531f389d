"""Attention: by the library's function and module, and by hand with the heads folded beside the samples."""

from __future__ import annotations

from fuzz.grammar.parameters import parameter
from fuzz.grammar.table import op
from fuzz.grammar.views import ranked
from fuzz.program import Misfit, Val, Writer


@op("attention")
def heads(w: Writer, x: Val) -> Val:
    """Queries, keys and values from one weight; heads beside the samples or in a dim of their own."""
    x = ranked(w, x, 3)
    lead, t, e = x.size(0), x.sizes[1], x.sizes[2]
    h = w.pick("heads", [k for k in (1, 2, 3) if e % k == 0])
    q = w.fresh("q")
    w.line(f"{q} = F.linear({x.name}, {parameter(w, [3 * e, e])}).view({lead}, {t}, 3, {h}, {e // h})")
    how, causal = w.pick("how", ["sdpa", "folded", "einsum", "outside"]), w.flag("causal")
    if how in ("sdpa", "einsum"):
        w.line(f"{q} = {q}.permute(2, 0, 3, 1, 4)")
    elif how == "folded":
        w.line(f"{q} = {q}.permute(2, 0, 3, 1, 4).reshape(3, {lead} * {h}, {t}, {e // h})")
    else:
        w.line(f"{q} = {q}.permute(2, 3, 0, 1, 4).reshape(3, {h} * {lead}, {t}, {e // h})")
    a = w.fresh("a")
    if how == "sdpa":
        mask = (
            f"attn_mask=torch.arange({t}) <= torch.arange({t}).view(-1, 1)"
            if w.flag("mask", 0.3)
            else f"is_causal={causal}"
        )
        w.line(f"{a} = F.scaled_dot_product_attention({q}[0], {q}[1], {q}[2], {mask})")
    else:
        score = (
            f"torch.einsum('bhid,bhjd->bhij', {q}[0], {q}[1])" if how == "einsum" else f"torch.bmm({q}[0], {q}[1].mT)"
        )
        masked = f".masked_fill(torch.ones({t}, {t}, dtype=torch.bool).triu(1), float('-inf'))" if causal else ""
        w.line(f"{a} = {score}{masked}.softmax(-1) @ {q}[2]")
    back = {
        "sdpa": f"{a}.transpose(1, 2).reshape({lead}, {t}, {e})",
        "einsum": f"{a}.transpose(1, 2).reshape({lead}, {t}, {e})",
        "folded": f"{a}.view({lead}, {h}, {t}, {e // h}).transpose(1, 2).flatten(2)",
        "outside": f"{a}.view({h}, {lead}, {t}, {e // h}).permute(1, 2, 0, 3).flatten(2)",
    }[how]
    return w.emit(back, x.sizes, 0, x.outer, x.inner)


@op("attention")
def module(w: Writer, x: Val) -> Val:
    """nn.MultiheadAttention or a layer of a transformer, samples first or second."""
    x = ranked(w, x, 3)
    t, e = x.sizes[1], x.sizes[2]
    h = w.pick("heads", [k for k in (1, 2) if e % k == 0])
    first, how = w.flag("batch first"), w.pick("how", ["attention", "weights", "encoder"])
    into, back = ("", "") if first else (".transpose(0, 1)", ".transpose(0, 1)")
    mask = f", attn_mask=torch.ones({t}, {t}, dtype=torch.bool).triu(1)" if w.flag("causal", 0.4) else ""
    y = w.fresh("a")
    w.line(f"{y} = {x.name}{into}")
    if how == "encoder":
        if e < 2:
            raise Misfit("one feature")
        options = f"dropout=0.0, batch_first={first}, norm_first={w.flag('norm first')}"
        layer = w.made("layer", f"nn.TransformerEncoderLayer({e}, {h}, 3, {options})")
        return w.emit(f"{layer}({y}{mask.replace('attn_mask', 'src_mask')}){back}", x.sizes, 0, x.outer, x.inner)
    layer = w.made("attention", f"nn.MultiheadAttention({e}, {h}, batch_first={first}, bias={w.flag('bias')})")
    need = how == "weights"
    return w.emit(f"{layer}({y}, {y}, {y}, need_weights={need}{mask})[0]{back}", x.sizes, 0, x.outer, x.inner)
