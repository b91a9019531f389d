"""Losses of every reduction, and normalisations by hand."""

from __future__ import annotations

from fuzz.grammar.parameters import parameter
from fuzz.grammar.table import op
from fuzz.grammar.views import plain
from fuzz.program import Data, Val, Writer

FLOAT = "torch.randn({shape}, dtype=torch.float64)"
UNIT = "torch.rand({shape}, dtype=torch.float64)"
SIGN = "torch.randint(2, {shape}) * 2.0 - 1"
ELEMENTS = {
    "F.mse_loss(o, t, reduction={r})": FLOAT, "F.l1_loss(o, t, reduction={r})": FLOAT,
    "F.smooth_l1_loss(o, t, reduction={r}, beta=0.7)": FLOAT, "F.huber_loss(o, t, reduction={r}, delta=0.6)": FLOAT,
    "F.binary_cross_entropy_with_logits(o, t, reduction={r})": UNIT,
    "F.binary_cross_entropy(o.sigmoid(), t, reduction={r})": UNIT, "F.soft_margin_loss(o, t, reduction={r})": SIGN,
    "F.poisson_nll_loss(o, t.abs(), reduction={r})": FLOAT,
    "F.gaussian_nll_loss(o, t, o.detach().square() + 0.1, reduction={r})": FLOAT,
    "F.kl_div(o.log_softmax(-1), t.softmax(-1), reduction={r})": FLOAT,
    "F.hinge_embedding_loss(o, t, reduction={r})": SIGN,
    "F.margin_ranking_loss(o, o.detach() * 0.5, t, reduction={r})": SIGN,
    "F.binary_cross_entropy_with_logits(o, t, reduction={r}, pos_weight=torch.tensor(1.5))": UNIT,
}  # fmt: skip
REDUCTIONS = ("mean", "sum", "none")
OWN = {
    "((o - t) ** 2).mean()": FLOAT, "((o - t) ** 2).sum()": FLOAT, "((o - t) ** 2).flatten(1).mean(1)": FLOAT,
    "((o - t) ** 2).flatten(1).sum(1).mean()": FLOAT, "((o - t) ** 2).sum() / o.shape[0]": FLOAT,
    "((o - t) ** 2).sum() / len(o)": FLOAT, "((o - t) ** 2).sum() / o.numel()": FLOAT,
    "((o - t) ** 2 * (t > 0)).sum() / ((t > 0).sum() + 1)": FLOAT,
    "((o - t) ** 2 * (t > 0)).sum() / (t > 0).sum().clamp(min=1)": FLOAT,
    "(o * t).flatten(1).sum(1).logsumexp(0)": FLOAT, "(o - t).square().mean().sqrt()": FLOAT,
    "(o - t).norm()": FLOAT, "(o * t).sum().square()": FLOAT, "o.sin().mul(t).mean().exp()": FLOAT,
    "(o - t).abs().amax()": FLOAT, "torch.stack([(o - t).square().mean(), o.abs().sum()]).sum()": FLOAT,
    "(o - t).square().mean() + 0.1 * o.abs().mean()": FLOAT, "(o - t).square().sum(0).sum()": FLOAT,
    "(o * t).mean(0).sum()": FLOAT, "((o - t) ** 2).flatten(1).mean(1).sum()": FLOAT,
    "(o - t).square().flatten().mean()": FLOAT, "torch.mean((o - t) ** 2, dim=list(range(o.ndim)))": FLOAT,
    "torch.dot(o.flatten(), t.flatten())": FLOAT, "torch.einsum('bi,bi->', o.flatten(1), t.flatten(1))": FLOAT,
    "((o - t) ** 2).nanmean()": FLOAT, "torch.linalg.vector_norm(o - t, 3)": FLOAT, "torch.dist(o, t)": FLOAT,
    "o.square().flatten(1).sum(1).max() * t.flatten(1).mean(1).sum()": FLOAT,
    "(o - t)[t > 0.8].square().mean() if (t > 0.8).any() else o.sum() * 0": FLOAT,
    "((o - t) ** 2 * (t > 0.8)).sum() / (t > 0.8).sum() if (t > 0.8).sum() > 0 else 0.0 * o.sum()": FLOAT,
    "o.abs().mean() + (o[t > 0.8].square().mean() if (t > 0.8).any() else 0.0)": FLOAT,
    "((o - t) ** 2 * (t > 0.8)).sum() / max((t > 0.8).sum().item(), 1)": FLOAT,
    "(o - t)[torch.where(t > 0.8)].square().sum() / (1 + (t > 0.8).sum().item())": FLOAT,
}  # fmt: skip
OPTIONS = (
    "", ", weight=torch.linspace(0.5, 1.5, {c}, dtype=o.dtype)", ", ignore_index=1", ", label_smoothing=0.2",
    ", weight=torch.linspace(0.5, 1.5, {c}, dtype=o.dtype), ignore_index=0", ", ignore_index=1, label_smoothing=0.1",
)  # fmt: skip


def output(w: Writer, x: Val, penalty: bool = True) -> Val:
    """What the model returns: the samples alone in dim 0."""
    found = plain(w, x)
    if found.ndim == 1 and w.flag("one column", 0.6):
        found = w.emit(f"{found.name}.unsqueeze(1)", [1, 1])
    if not w.parameters and not w.setup:
        found = w.like(found, f"{{x}} * {parameter(w, [], 'last')}")
    return found


@op("loss")
def elements(w: Writer, x: Val) -> Val:
    """A loss of the library for each element."""
    o = output(w, x)
    code = w.pick("how", list(ELEMENTS))
    reduction = w.pick("reduction", REDUCTIONS)
    w.target = Data("t", o.sizes[1:], ELEMENTS[code])
    w.loss_lines = _closed(w, code.replace("{r}", f"'{reduction}'"), reduction == "none", o)
    return o


def _closed(w: Writer, code: str, each: bool, o: Val) -> list[str]:
    """What is done with a loss for each element, or row."""
    if not each:
        return [f"return {code}"]
    flat = "v.flatten(1)" if o.ndim > 1 else "v.unsqueeze(1)"
    return [
        f"v = {code}",
        "return "
        + w.pick("own", ["v.mean()", f"{flat}.sum(1)", f"{flat}.mean(1).mean()", f"{flat}.mean(1).sum()", "v.sum()"]),
    ]


@op("loss")
def by_hand(w: Writer, x: Val) -> Val:
    """A normalisation of one's own."""
    o = output(w, x)
    if o.ndim == 1:
        o = w.emit(f"{o.name}.unsqueeze(1)", [1, 1])
    code = w.pick("how", list(OWN))
    w.target = Data("t", o.sizes[1:], OWN[code])
    w.loss_lines = [f"return {code}"]
    return o


@op("loss")
def classes(w: Writer, x: Val) -> Val:
    """Cross entropies, for one class a sample or many."""
    o = output(w, x)
    if o.ndim == 1:
        o = w.emit(f"{o.name}.unsqueeze(1)", [1, 1])
    c = o.sizes[1]
    how = w.pick("how", ["F.cross_entropy", "F.nll_loss", "F.multi_margin_loss"])
    reduction = w.pick("reduction", REDUCTIONS)
    options = w.pick("options", OPTIONS).replace("{c}", str(c))
    if how != "F.cross_entropy":
        options = options if "smoothing" not in options and how == "F.nll_loss" else ""
    scores = "o.log_softmax(1)" if how == "F.nll_loss" else "o"
    if how == "F.multi_margin_loss" and o.ndim > 2:
        o = w.emit(f"{o.name}.flatten(2).sum(2)", [1, c])
    target, places = "t", o.sizes[2:]
    if len(places) == 1 and w.flag("tokens"):
        scores, target = f"{scores}.transpose(1, 2).reshape(-1, {c})", "t.reshape(-1)"
        call = f"{how}({scores}, {target}{options}, reduction='{reduction}')"
        each = f".view(-1, {places[0]})"
        w.loss_lines = _closed(w, call + (each if reduction == "none" else ""), reduction == "none", o)
    else:
        places_kept = Val("", (1, *places))
        call = f"{how}({scores}, {target}{options}, reduction='{reduction}')"
        w.loss_lines = _closed(w, call, reduction == "none", places_kept)
    w.target = Data("t", places, f"torch.randint({c}, {{shape}})")
    return o


@op("loss")
def penalised(w: Writer, x: Val) -> Val:
    """The model returns its own loss: one for each sample, a mean, or a sum."""
    o = output(w, x)
    code = w.pick(
        "how",
        [
            "{x}.square().mean()",
            "{x}.sin().sum()",
            "{x}.square().reshape(b, -1).sum(1)",
            "{x}.square().mean() + {p}.square().sum()",
        ],
    )
    if "{p}" in code:
        code = code.replace("{p}", parameter(w, [2], "penalty"))
    w.loss_lines = ["return o"]
    return w.emit(code.replace("{x}", o.name), [1] if "(1)" in code else [])
