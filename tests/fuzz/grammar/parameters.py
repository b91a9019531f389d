"""What an op reads: a parameter of its own, one used before, or what is made of parameters first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fuzz.program import Misfit, Writer

PREFIXES = (
    "own", "again", "transposed", "slice", "expand", "product", "low rank", "weight norm", "gather", "softmax",
    "cat", "stack", "tanh", "flip", "flat", "cumsum", "scaled", "symmetric", "tril", "centred", "cast", "spectral",
    "again with own", "masked", "permuted", "repeat", "selected", "outer", "padded", "exp",
)  # fmt: skip


def parameter(w: Writer, shape: Sequence[int], name: str = "weight") -> str:
    """The code of an operand of that shape that is made of parameters."""
    shape = list(shape)
    again = _again_options(w, shape)
    odds = (100 if w.program.tied else 15) if again else 0
    how = w.pick(name, ["own"] * 20 + ["again"] * odds + list(PREFIXES[2:]))
    code = _made(w, how, shape, name)
    w.rough |= how == "cast"
    if how in ("own", "again"):
        return code
    made = w.fresh("w")
    w.line(f"{made} = {code}")
    return made


def _made(w: Writer, how: str, shape: list[int], name: str) -> str:
    if how in _SIMPLE:
        return _SIMPLE[how].replace("{p}", w.stored(shape)).replace("{shape}", str(shape))
    if how in ("again", "again with own"):
        return w.pick(name + " again", _again_options(w, shape)) + (f" + {w.stored(shape)}" if how != "again" else "")
    if how == "product":
        return f"{w.stored(shape)} * {w.stored(shape)}"
    if not shape:
        raise Misfit("a scalar")
    d = w.pick(name + " dim", list(range(len(shape))))
    n = shape[d]
    other = [*shape[:d], *shape[d + 1 :]]
    if how == "slice":
        return f"{w.stored([*shape[:d], n + 2, *shape[d + 1 :]])}.narrow({d}, 1, {n})"
    if how == "expand":
        return f"{w.stored([*shape[:d], 1, *shape[d + 1 :]])}.expand({shape})"
    if how == "selected":
        return f"{w.stored([*shape[:d], 2, *shape[d:]])}.select({d}, 1)"
    if how == "stack":
        return f"torch.stack([{', '.join(w.stored(other) for _ in range(n))}], {d})"
    if how == "cat" and n > 1:
        parts = [w.stored([*shape[:d], k, *shape[d + 1 :]]) for k in (1, n - 1)]
        return f"torch.cat([{', '.join(parts)}], {d})"
    if how == "gather":
        ids = ", ".join(str((3 * k + 1) % (n + 1)) for k in range(n))
        return f"{w.stored([*shape[:d], n + 1, *shape[d + 1 :]])}.index_select({d}, torch.tensor([{ids}]))"
    if how == "repeat" and n % 2 == 0:
        counts = [2 if k == d else 1 for k in range(len(shape))]
        return f"{w.stored([*shape[:d], n // 2, *shape[d + 1 :]])}.repeat({counts})"
    if how == "padded" and n > 1 and d == len(shape) - 1:
        return f"F.pad({w.stored([*shape[:d], n - 1])}, (1, 0))"
    if how in _ALONG:
        return (
            _ALONG[how]
            .replace("{p}", w.stored(shape))
            .replace("{d}", str(d))
            .replace("{g}", w.stored([n] + [1] * (len(shape) - d - 1)))
        )
    return _matrix(w, how, shape)


_SIMPLE = {
    "own": "{p}", "tanh": "{p}.tanh()", "exp": "{p}.exp()", "cast": "{p}.float().double()",
    "masked": "{p} * ({p}.detach().abs() > 0.2)",
}  # fmt: skip
_ALONG = {
    "softmax": "{p}.softmax({d})", "flip": "{p}.flip({d})", "cumsum": "{p}.cumsum({d})",
    "centred": "{p} - {p}.mean({d}, keepdim=True)", "scaled": "{p} * {g}",
    "weight norm": "{g} * {p} / {p}.norm(dim={d}, keepdim=True)",
}  # fmt: skip


def _again_options(w: Writer, shape: list[int]) -> list[str]:
    """The parameters used before that fit, with their own layout or another."""
    options = []
    for known, sizes in w.parameters.items():
        if list(sizes) == shape:
            options.append(f"self.{known}")
        if len(sizes) >= 2 and [*sizes[:-2], sizes[-1], sizes[-2]] == shape:
            options.append(f"self.{known}.mT")
        if list(sizes) != shape and math.prod(sizes) == math.prod(shape):
            options.append(f"self.{known}.reshape({shape})")
        if len(sizes) == len(shape) and list(sizes) != shape and all(s >= t for s, t in zip(sizes, shape, strict=True)):
            options.append(f"self.{known}[{', '.join(f':{t}' for t in shape)}]")
    return options


def _matrix(w: Writer, how: str, shape: list[int]) -> str:
    """Prefixes of matrices, and of their like with more dims."""
    if how == "flat":
        return f"{w.stored([math.prod(shape)])}.view({shape})"
    if len(shape) < 2:
        raise Misfit("a vector")
    *lead, rows, columns = shape
    if how == "transposed":
        return f"{w.stored([*lead, columns, rows])}.mT"
    if how == "permuted":
        return f"{w.stored([columns, *lead, rows])}.movedim(0, -1)"
    if how == "low rank":
        return f"{w.stored([*lead, rows, 2])} @ {w.stored([*lead, 2, columns])}"
    if how == "outer":
        return f"{w.stored([*lead, rows, 1])} * {w.stored([*lead, 1, columns])}"
    if how == "tril":
        return f"{w.stored(shape)}.tril()"
    if how == "symmetric" and rows == columns:
        p = w.stored(shape)
        return f"{p} + {p}.mT"
    if how == "spectral" and rows == columns:
        p = w.stored(shape)
        return f"torch.matrix_exp({p} - {p}.mT)"
    raise Misfit(how)
