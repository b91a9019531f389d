"""Contractions: every one is an einsum, and the samples are one label of it that is kept."""

from __future__ import annotations

from collections.abc import Sequence

from psg_fx.graph.facts import SampleAxis

from ..table import Placement, sample_rule
from ..values import REDUCED, Argument, Op, Result, broadcast

Labels = list[str]


def contraction(op: Op, operands: Sequence[Argument], labels: Sequence[Labels], out: Labels) -> SampleAxis | None:
    """y[out] = Σ Π operand[labels]: all operands with samples hold them in one label, in one layout, and y keeps it."""
    axis: SampleAxis | None = None
    label, lead = "", operands[0]
    for operand, names in zip(operands, labels, strict=True):
        if operand.axis is None:
            continue
        found = names[operand.axis.dim]
        if axis is None:
            axis, label, lead = operand.axis, found, operand
        elif found != label:
            raise op.refuse(
                f"it multiplies %{lead.node.name} (samples in {axis}) with %{operand.node.name} (samples in "
                f"{operand.axis}) so that every sample meets every other",
                "multiply within a sample: keep the sample dim in front of both (bmm, einsum 'b...,b...')",
            )
        elif (axis.outer, axis.inner) != (operand.axis.outer, operand.axis.inner):
            if not (operand.found.uniform or lead.found.uniform):
                raise op.refuse(
                    f"%{lead.node.name} holds the samples as {axis} and %{operand.node.name} as {operand.axis}, so "
                    "rows of different samples are multiplied",
                    "fold the dims of both in the same order",
                )
            if lead.found.uniform:
                axis, lead = operand.axis, operand
    if axis is None:
        return None
    if label not in out:
        raise op.refuse(
            f"its sum runs over dim {axis.dim} of %{lead.node.name}, the sample dim",
            "sum within a sample only; a statistic over the batch (covariance, Gram matrix) has no per-sample gradient",
        )
    return SampleAxis(out.index(label), axis.outer, axis.inner)


def batch_labels(ndims: Sequence[int]) -> list[Labels]:
    """Labels of leading dims that broadcast from the right; `ndims` says how many dims of each are leading."""
    most = max(ndims)
    return [[f"n{most - count + d}" for d in range(count)] for count in ndims]


def _with_addend(op: Op, found: SampleAxis | None, ndim: int) -> Placement:
    """Y = β input + contraction."""
    addend = op.need("input" if "input" in op.args else "self")
    product = Argument(op.node, op.out(), Result(found))
    return broadcast(op, [product, addend], ndim).axes


@sample_rule("matmul", "linalg_matmul", "mm", "bmm", "mv", "_int_mm", proof="contraction")
def matmul(op: Op) -> Placement:
    """y[n.., i, j] = Σ_k a[n.., i, k] b[n.., k, j]; one-dim factors lose i or j."""
    a = op.value("self") or op.need("input")
    b = op.value("other") or op.value("mat2") or op.need("vec")
    return _product(op, a, b)


def _product(op: Op, a: Argument, b: Argument) -> SampleAxis | None:
    lead_a, lead_b = batch_labels([max(a.ndim - 2, 0), max(b.ndim - 2, 0)])
    rows, columns = (["i"] if a.ndim > 1 else []), (["j"] if b.ndim > 1 else [])
    longest = lead_a if len(lead_a) >= len(lead_b) else lead_b
    return contraction(op, [a, b], [[*lead_a, *rows, "k"], [*lead_b, "k", *columns]], longest + rows + columns)


@sample_rule("inner", proof="contraction")
def inner(op: Op) -> Placement:
    """y[i.., j..] = Σ_k a[i.., k] b[j.., k]; with a number it is a product, element by element."""
    a, b = op.need("self"), op.need("other")
    last = ["k"] if a.ndim and b.ndim else []
    rows, columns = ([f"{letter}{d}" for d in range(x.ndim - len(last))] for letter, x in (("i", a), ("j", b)))
    return contraction(op, [a, b], [rows + last, columns + last], rows + columns)


@sample_rule("addmm", "_addmm_activation", "baddbmm", "addmv", proof="contraction")
def addmm(op: Op) -> Placement:
    """Y = β input + α a b."""
    names = {"aten.baddbmm": ("batch1", "batch2"), "aten.addmv": ("mat", "vec")}.get(op.name, ("mat1", "mat2"))
    return _with_addend(op, _product(op, op.need(names[0]), op.need(names[1])), len(op.out().shape))


@sample_rule("outer", "ger", "addr", proof="contraction")
def outer(op: Op) -> Placement:
    """y[i, j] = a[i] b[j]."""
    first, second = ("vec1", "vec2") if op.name == "aten.addr" else ("self", "vec2")
    found = contraction(op, [op.need(first), op.need(second)], [["i"], ["j"]], ["i", "j"])
    return _with_addend(op, found, 2) if op.name == "aten.addr" else found


@sample_rule("linear", proof="contraction")
def linear(op: Op) -> Placement:
    """y[.., o] = Σ_i x[.., i] W[o, i] + bias[o]."""
    x, weight, bias = op.need("input"), op.need("weight"), op.value("bias")
    lead = [f"n{d}" for d in range(x.ndim - 1)]
    outs = ["o"] if weight.ndim == 2 else []
    found = contraction(op, [x, weight], [[*lead, "i"], [*outs, "i"]], lead + outs)
    if bias is None:
        return found
    product = Argument(op.node, op.out(), Result(found))
    return broadcast(op, [product, bias], len(op.out().shape)).axes


@sample_rule("psg_fx::expert_mm", proof="contraction")
def expert_mm(op: Op) -> Placement:
    """y[r, o] = Σ_i x[r, i] w[ids[r], i, o]."""
    x, w, ids = op.need("x"), op.need("w"), op.need("ids")
    if w.axis is not None:
        raise op.refuse("the matrices of its experts carry samples", "use one set of matrices for all samples")
    if x.axis is not None and x.axis.dim != 0:
        raise op.refuse("the samples lie in the features, which it multiplies")
    if x.axis != ids.axis:
        raise op.refuse(f"%{x.node.name} and %{ids.node.name} hold the samples in different places")
    return x.axis


@sample_rule("bilinear", proof="contraction")
def bilinear(op: Op) -> Placement:
    """y[.., o] = Σ_ij a[.., i] W[o, i, j] b[.., j] + bias[o]."""
    a, b, weight = op.need("input1"), op.need("input2"), op.need("weight")
    lead = [f"n{d}" for d in range(a.ndim - 1)]
    if (bias := op.value("bias")) is not None and bias.axis is not None:
        raise op.unsupported("its bias carries samples")
    return contraction(op, [a, b, weight], [[*lead, "i"], [*lead, "j"], ["o", "i", "j"]], [*lead, "o"])


@sample_rule("einsum", proof="contraction")
def einsum(op: Op) -> Placement:
    """The equation itself; `...` stands for leading dims that broadcast from the right."""
    operands = op.values_of("tensors")
    left, arrow, right = op.raw("equation").replace(" ", "").partition("->")
    terms = left.split(",")
    widths = [v.ndim - len(t.replace("...", "")) for v, t in zip(operands, terms, strict=True)]
    most = max(widths)
    labels = [_labels(t, w, most) for t, w in zip(terms, widths, strict=True)]
    if arrow:
        out = _labels(right, most, most)
    else:
        flat = [c for t in labels for c in t]
        out = [f".{d}" for d in range(most)] + sorted(c for c in set(flat) if flat.count(c) == 1 and c[0] != ".")
    for value, names in zip(operands, labels, strict=True):
        if value.axis is not None and names.count(names[value.axis.dim]) > 1:
            raise op.refuse(f"it takes a diagonal of %{value.node.name} through the sample dim")
    if not out and (held := {names[v.axis.dim] for v, names in zip(operands, labels, strict=True) if v.axis}):
        contraction(op, operands, labels, sorted(held))  # the same rows meet; then all are summed
        return REDUCED
    return contraction(op, operands, labels, out)


def _labels(term: str, width: int, most: int) -> Labels:
    before, dots, after = term.partition("...")
    return [*before, *([f".{d}" for d in range(most - width, most)] if dots else []), *after]


@sample_rule("tensordot", proof="contraction")
def tensordot(op: Op) -> Placement:
    """y[free a, free b] = Σ over the pairs of dims."""
    a, b = op.need("self"), op.need("other")
    left = [f"a{d}" for d in range(a.ndim)]
    right = [f"b{d}" for d in range(b.ndim)]
    pairs = list(zip(op.dims("dims_self", a.ndim) or [], op.dims("dims_other", b.ndim) or [], strict=True))
    for i, j in pairs:
        right[j] = left[i]
    summed = {left[i] for i, _ in pairs}
    return contraction(op, [a, b], [left, right], [n for n in left + right if n not in summed])


@sample_rule("cdist", "_cdist_forward", "_euclidean_dist", proof="contraction")
def cdist(op: Op) -> Placement:
    """y[n.., i, j] = ‖a[n.., i, :] - b[n.., j, :]‖."""
    a, b = op.need("x1"), op.need("x2")
    lead_a, lead_b = batch_labels([a.ndim - 2, b.ndim - 2])
    longest = lead_a if len(lead_a) >= len(lead_b) else lead_b
    return contraction(op, [a, b], [[*lead_a, "i", "k"], [*lead_b, "j", "k"]], [*longest, "i", "j"])


@sample_rule("kron", "chain_matmul", "linalg_multi_dot", "addbmm", "block_diag", "cartesian_prod", proof="contraction")
def unruled_products(op: Op) -> Placement:
    """Products of all rows with all rows."""
    raise op.unsupported("it is a product of whole matrices without a rule", "write it with matmul or einsum")


_ATTENTION = """
    scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable
"""


@sample_rule(*_ATTENTION.split(), proof="attention")
def attention(op: Op) -> Placement:
    """y[n.., l, e] = Σ_s softmax_s(q[n.., l, :] · k[n.., s, :] + mask[n.., l, s]) v[n.., s, e]; samples in n."""
    q, k, v = op.need("query"), op.need("key"), op.need("value")
    for value in (q, k, v):
        if value.axis is not None and value.axis.dim >= value.ndim - 2:
            raise op.refuse(
                f"dim {value.axis.dim} of %{value.node.name}, the sample dim, is the dim attention runs over",
                "give the samples a leading dim: [B, heads, tokens, channels] (MultiheadAttention: batch_first=True)",
            )
        if value.axis is not None and value.axis.dim == value.ndim - 3 and op.raw("enable_gqa", False):
            raise op.refuse("the sample dim is the dim of grouped heads")
    ndim = len(op.out().shape)
    values = [q, k, v]
    mask = next((m for n in ("attn_mask", "attn_bias") if (m := op.value(n)) is not None), None)
    if mask is not None:
        if mask.axis is not None and mask.axis.dim >= mask.ndim - 2:
            raise op.refuse("the mask holds the samples in a dim of tokens", "unsqueeze the mask to [B, 1, L, S]")
        values.append(mask)
    return broadcast(op, values, ndim).axes
