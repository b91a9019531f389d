"""Views, folds and unfolds of the batch, pieces and gathers: what moves elements and computes nothing."""

from __future__ import annotations

from fuzz.grammar.table import op
from fuzz.program import Misfit, Val, Writer, times

VIEW = ("reshape", "contiguous().view", "clone().reshape")


@op("fold")
def merge(w: Writer, x: Val) -> Val:
    """Two neighbouring dims become one; with the samples in it, that is a fold."""
    near = [d for d in range(x.ndim - 1) if x.dim in (d, d + 1)] + list(range(x.ndim - 1))
    d = w.pick("dim", near)
    sizes = [*x.sizes[:d], x.sizes[d] * x.sizes[d + 1], *x.sizes[d + 2 :]]
    outer, inner, dim = x.outer, x.inner, x.dim
    if dim == d:
        inner *= x.sizes[d + 1]
    elif dim == d + 1:
        outer, dim = outer * x.sizes[d], d
    elif dim is not None and dim > d:
        dim -= 1
    made = Val("", tuple(sizes), dim, outer, inner)
    how = w.pick("how", ["flatten", "reshape", "view"])
    if how == "flatten":
        return w.emit(f"{x.name}.flatten({d}, {d + 1})", sizes, dim, outer, inner)
    code = {"reshape": "reshape", "view": "contiguous().view"}[how]
    shape = [made.size(k) for k in range(made.ndim)]
    if w.flag("minus one", 0.3):
        shape[d] = "-1"
    return w.emit(f"{x.name}.{code}({', '.join(shape)})", sizes, dim, outer, inner)


@op("fold")
def split(w: Writer, x: Val) -> Val:
    """A dim becomes two."""
    options = [(d, k) for d in x.free for k in range(1, x.sizes[d] + 1) if x.sizes[d] % k == 0]
    d, k = w.pick("dim", options)
    n = x.sizes[d] // k
    sizes = [*x.sizes[:d], k, n, *x.sizes[d + 1 :]]
    dim = x.dim + 1 if x.dim is not None and x.dim > d else x.dim
    if w.flag("unflatten", 0.3):
        return w.emit(f"{x.name}.unflatten({d}, ({k}, {n}))", sizes, dim, x.outer, x.inner)
    shape = [x.size(i) for i in range(x.ndim)]
    shape[d : d + 1] = [str(k), str(n)]
    return w.emit(f"{x.name}.{w.pick('how', VIEW)}({', '.join(shape)})", sizes, dim, x.outer, x.inner)


@op("fold")
def unfold_samples(w: Writer, x: Val) -> Val:
    """A dim of outer · B · inner becomes its parts."""
    if x.dim is None or (x.outer, x.inner) == (1, 1):
        raise Misfit("nothing is folded")
    return unfolded(w, x)


def unfolded(w: Writer, x: Val) -> Val:
    """The sample dim by itself."""
    if x.dim is None or (x.outer, x.inner) == (1, 1):
        return x
    parts, d = [(s, n) for s, n in ((x.outer, "o"), (1, "b"), (x.inner, "i")) if n == "b" or s != 1], x.dim
    sizes = [*x.sizes[:d], *(s for s, _ in parts), *x.sizes[d + 1 :]]
    shape = [x.size(i) for i in range(x.ndim)]
    shape[d : d + 1] = ["b" if n == "b" else str(s) for s, n in parts]
    at = d + [n for _, n in parts].index("b")
    return w.emit(f"{x.name}.reshape({', '.join(shape)})", sizes, at)


def plain(w: Writer, x: Val) -> Val:
    """The samples in dim 0, alone."""
    if x.dim is None:
        raise Misfit("no samples")
    x = unfolded(w, x)
    assert x.dim is not None
    if x.dim == 0:
        return x
    d = x.dim
    sizes = [x.sizes[d], *(s for k, s in enumerate(x.sizes) if k != d)]
    return w.emit(f"{x.name}.movedim({d}, 0)", sizes)


def ranked(w: Writer, x: Val, rank: int) -> Val:
    """The samples (perhaps with others folded beside them) in dim 0, of so many dims."""
    if x.dim != 0 or not w.flag("keep fold"):
        x = plain(w, x)
    if x.ndim == rank:
        return x
    lead = x.size(0)
    if x.ndim > rank:
        tail, shape = x.sizes[rank - 1 :], [x.size(k) for k in range(rank - 1)]
        count = 1
        for s in tail:
            count *= s
        sizes = [*x.sizes[: rank - 1], count]
        return w.emit(f"{x.name}.reshape({', '.join([*shape, str(count)])})", sizes, 0, x.outer, x.inner)
    ones = [1] * (rank - x.ndim)
    sizes = [x.sizes[0], *ones, *x.sizes[1:]]
    shape = [lead, *map(str, ones), *map(str, x.sizes[1:])]
    return w.emit(f"{x.name}.reshape({', '.join(shape)})", sizes, 0, x.outer, x.inner)


@op("fold")
def repeat_samples(w: Writer, x: Val) -> Val:
    """Copies of the samples, outside of them or inside."""
    n = w.pick("times", [2, 3])
    if x.dim is None:
        raise Misfit("no samples")
    sizes = [s * n if d == x.dim else s for d, s in enumerate(x.sizes)]
    how = w.pick("how", ["inside", "outside", "cat"])
    if how == "inside":
        return w.emit(f"{x.name}.repeat_interleave({n}, {x.dim})", sizes, x.dim, x.outer, x.inner * n)
    if how == "outside":
        counts = ", ".join(str(n) if d == x.dim else "1" for d in range(x.ndim))
        return w.emit(f"{x.name}.repeat({counts})", sizes, x.dim, x.outer * n, x.inner)
    parts = ", ".join(x.name if k == 0 else f"{x.name} * {k + 1}" for k in range(n))
    return w.emit(f"torch.cat([{parts}], {x.dim})", sizes, x.dim, x.outer * n, x.inner)


@op("fold")
def block(w: Writer, x: Val) -> Val:
    """One whole block of all samples."""
    if x.dim is None or x.outer == 1:
        raise Misfit("one block only")
    d, k = x.dim, w.pick("block", list(range(x.outer)))
    size = times("b", x.inner)
    sizes = [x.inner if i == d else s for i, s in enumerate(x.sizes)]
    how = w.pick("how", ["slice", "narrow", "chunk", "split"])
    at = ":, " * d
    code = {
        "slice": f"{x.name}[{at}{times(k, size) if k else '0'} : {times(k + 1, size)}]",
        "narrow": f"{x.name}.narrow({d}, {times(k, size) if k else '0'}, {size})",
        "chunk": f"{x.name}.chunk({x.outer}, {d})[{k}]",
        "split": f"{x.name}.split({size}, {d})[{k}]",
    }[how]
    return w.emit(code, sizes, d, 1, x.inner)


@op("view")
def permute(w: Writer, x: Val) -> Val:
    """Dims in another order."""
    if x.ndim < 2:
        raise Misfit("one dim")
    first, second = w.pick("dims", [(a, b) for a in range(x.ndim) for b in range(x.ndim) if a != b])
    order = list(range(x.ndim))
    how = w.pick("how", ["transpose", "movedim", "permute"])
    if how == "movedim":
        order.insert(second, order.pop(first))
        code = f"movedim({first}, {second})"
    else:
        order[first], order[second] = second, first
        code = f"transpose({first}, {second})" if how == "transpose" else f"permute({', '.join(map(str, order))})"
    dim = None if x.dim is None else order.index(x.dim)
    return w.emit(f"{x.name}.{code}", [x.sizes[d] for d in order], dim, x.outer, x.inner)


@op("view")
def ones(w: Writer, x: Val) -> Val:
    """A dim of size one comes, goes, or is expanded."""
    single = [d for d in x.free if x.sizes[d] == 1]
    how = w.pick("how", ["unsqueeze", "squeeze", "expand"] if single else ["unsqueeze"])
    if how == "unsqueeze":
        d = w.pick("at", list(range(x.ndim + 1)))
        dim = x.dim + 1 if x.dim is not None and x.dim >= d else x.dim
        return w.emit(f"{x.name}.unsqueeze({d})", [*x.sizes[:d], 1, *x.sizes[d:]], dim, x.outer, x.inner)
    d = w.pick("dim", single)
    if how == "squeeze":
        return w.without(x, f"{{x}}.squeeze({d})", d)
    n = w.pick("size", [2, 3])
    counts = ", ".join(str(n) if k == d else "-1" for k in range(x.ndim))
    return w.resized(x, f"{{x}}.expand({counts})", d, n)


@op("view")
def piece(w: Writer, x: Val) -> Val:
    """A part of a dim without samples."""
    d = w.pick("dim", x.free)
    n, at = x.sizes[d], ":, " * d
    how = w.pick("how", ["select", "slice", "step", "negative", "narrow", "index", "chunk swap", "unbind"])
    if how == "select":
        return w.without(x, f"{{x}}.select({d}, {w.pick('index', [0, n - 1])})", d)
    if how == "unbind":
        return w.without(x, f"torch.stack({{x}}.unbind({d})).sum(0)", d)
    if how == "chunk swap":
        return w.resized(x, f"torch.cat({{x}}.chunk(2, {d})[::-1], {d})", d, n)
    if n < 2:
        raise Misfit("one entry")
    code, size = {
        "slice": (f"{{x}}[{at}1:]", n - 1),
        "step": (f"{{x}}[{at}::2]", (n + 1) // 2),
        "negative": (f"{{x}}[{at}:-1]", n - 1),
        "narrow": (f"{{x}}.narrow({d}, {n - 1}, 1)", 1),
        "index": (f"{{x}}[{at}[{n - 1}, 0, {n - 1}]]", 3),
    }[how]
    return w.resized(x, code, d, size)


@op("view")
def order(w: Writer, x: Val) -> Val:
    """Elements at other places of a dim without samples."""
    d = w.pick("dim", x.free)
    code = w.pick(
        "how", ["{x}.flip({d})", "{x}.roll(1, {d})", "{x}.repeat_interleave(2, {d})", "torch.cat([{x}, {x} * 2], {d})"]
    )
    size = x.sizes[d] * (2 if "repeat" in code or "cat" in code else 1)
    return w.resized(x, code.replace("{d}", str(d)), d, size)


@op("view")
def windows(w: Writer, x: Val) -> Val:
    """Overlapping windows; a new last dim."""
    d = w.pick("dim", x.free)
    size = w.pick("size", [k for k in (1, 2, 3) if k <= x.sizes[d]])
    step = w.pick("step", [1, 2])
    sizes = [(s - size) // step + 1 if k == d else s for k, s in enumerate(x.sizes)]
    return w.emit(f"{x.name}.unfold({d}, {size}, {step})", [*sizes, size], x.dim, x.outer, x.inner)


@op("view")
def pad(w: Writer, x: Val) -> Val:
    """Padding of the last dim."""
    d = x.ndim - 1
    if x.dim == d:
        raise Misfit("samples last")
    left, right = w.pick("amount", [(0, 1), (1, 1), (2, 0), (-1, 1), (0, -1)])
    if x.sizes[d] + left + right < 1:
        raise Misfit("empty")
    return w.resized(
        x, f"F.pad({{x}}, ({left}, {right}), value={w.pick('value', [0.0, 0.5])})", d, x.sizes[d] + left + right
    )


@op("view")
def matrices(w: Writer, x: Val) -> Val:
    """Diagonals and triangles of the last two dims."""
    if x.ndim < 3 or x.dim is None or x.dim >= x.ndim - 2:
        raise Misfit("no matrices")
    how = w.pick("how", ["tril", "triu", "diagonal", "mT"])
    if how == "diagonal":
        sizes = [*x.sizes[:-2], min(x.sizes[-2:])]
        return w.emit(f"{x.name}.diagonal(dim1=-2, dim2=-1)", sizes, x.dim, x.outer, x.inner)
    if how == "mT":
        return w.emit(f"{x.name}.mT", [*x.sizes[:-2], x.sizes[-1], x.sizes[-2]], x.dim, x.outer, x.inner)
    return w.like(x, f"{{x}}.{how}({w.pick('diagonal', [0, 1, -1])})")


@op("gather")
def gathered(w: Writer, x: Val) -> Val:
    """Elements picked by what the data say."""
    d = w.pick("dim", x.free)
    n = x.sizes[d]
    how = w.pick("how", ["gather", "argsort", "scatter", "index_select", "one_hot", "index_add"])
    if how == "gather":
        return w.like(x, f"{{x}}.gather({d}, ({{x}} > 0).long() * {n - 1})")
    if how == "argsort":
        return w.like(x, f"{{x}}.gather({d}, {{x}}.detach().argsort({d}))")
    if how == "scatter":
        return w.like(x, f"torch.zeros_like({{x}}).scatter_add({d}, ({{x}} > 0).long() * {n - 1}, {{x}})")
    if how == "one_hot":
        return w.like(x, f"{{x}} * F.one_hot({{x}}.detach().argmax({d}), {n}).movedim(-1, {d})")
    ids = f"torch.tensor([{', '.join(str((2 * k + 1) % n) for k in range(n))}])"
    if how == "index_add":
        return w.like(x, f"torch.zeros_like({{x}}).index_add({d}, {ids}, {{x}})")
    return w.like(x, f"{{x}}.index_select({d}, {ids})")


@op("gather")
def own_row(w: Writer, x: Val) -> Val:
    """The row that each sample chooses."""
    x = plain(w, x)
    if x.ndim < 2:
        raise Misfit("one dim")
    chosen = f"{x.name}.detach().flatten(1).cumsum(1).sum(1).gt(0).long() * {x.sizes[1] - 1}"
    return w.emit(f"{x.name}[torch.arange(b), {chosen}]", [1, *x.sizes[2:]])
