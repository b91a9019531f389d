"""Ops that run along one dim (or a few) and leave the others alone: softmax, cumsum, sort, flip, fft, linalg."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psg_fx.graph import sample_axis
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.sample_axis import positive

from ..refused import FIX, GATHER
from ..table import Placement, sample_rule
from ..values import Argument, Op, Result, broadcast, samples_of

_DONE = {
    "softmax": "its sum runs",
    "cumsum": "each row adds up the rows before it",
    "cumprod": "each row multiplies the rows before it",
    "sort": "it sorts",
    "topk": "it picks the largest rows",
    "flip": "it exchanges rows",
    "roll": "it moves rows",
}


def _main(op: Op) -> Argument:
    return op.value("self") or op.value("input") or op.value("y") or op.need("A")


def _alone(op: Op) -> Argument:
    """The main argument, if no other one carries samples."""
    x = _main(op)
    for other in op.sampled():
        if other.node is not x.node:
            raise op.unsupported(f"its argument %{other.node.name} carries samples too")
    return x


def _refuse_along(op: Op, dim: int) -> Exception:
    short = op.name.removeprefix("aten.").strip("_").replace("log_softmax", "softmax")
    return op.refuse(f"{_DONE.get(short, 'it runs')} along dim {dim}, the sample dim", _fix(op, short))


def _fix(op: Op, short: str) -> str:
    x = _main(op)
    if short == "softmax" and x.ndim > 1:
        return f"give the dim of the classes, e.g. dim={-1 if x.axis and x.axis.dim != x.ndim - 1 else 0}"
    return FIX


def along(name: str, default: int | None) -> Callable[[Op], Placement]:
    """A rule maker: the op runs along the dim(s) in argument `name`; without it, along `default` or (None) all."""

    def apply(op: Op) -> Placement:
        x = _alone(op)
        if x.axis is None:
            return None
        dims = op.dims(name, x.ndim)
        if dims is None:
            dims = list(range(x.ndim)) if default is None else [positive(default, x.ndim)]
        if x.axis.dim in dims:
            raise _refuse_along(op, x.axis.dim)
        return x.axis

    return apply


@sample_rule("sort", "argsort", "msort", proof="along another dim")
def sort(op: Op) -> Placement:
    """Along `dim`.  An order of integers over all samples is how rows are brought to the expert or class they name."""
    x = _main(op)
    integers = not x.node.meta["val"].is_floating_point()
    if x.axis is not None and integers and x.axis.dim == op.dim("dim", x.ndim, 0 if op.name == "aten.msort" else -1):
        raise op.unsupported(f"it sorts the rows of all samples by an integer along dim {x.axis.dim}, so no sample's "
                             "rows have a place", f"{GATHER}; to pack sequences, enforce_sorted=False")  # fmt: skip
    return along("dim", 0 if op.name == "aten.msort" else -1)(op)


for _names, _argument, _default in (
    ("softmax log_softmax _softmax _log_softmax _safe_softmax special_softmax special_log_softmax", "dim", -1),
    ("cumsum cumprod cummax cummin logcumsumexp _logcumsumexp glu", "dim", -1),
    ("topk", "dim", -1),
    ("flip", "dims", None),
    ("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", "dim", -1),
    ("fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn fft_fftshift fft_ifftshift", "dim", None),
    ("_fft_c2c _fft_r2c _fft_c2r fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2", "dim", None),
    ("diff cumulative_trapezoid", "dim", -1),
    ("rot90", "dims", None),
    ("roll", "dims", None),
):
    sample_rule(*_names.split(), proof="along another dim")(along(_argument, _default))


@sample_rule("trapz", "trapezoid", proof="along another dim")
def trapezoid(op: Op) -> Placement:
    """An integral along one dim, which goes."""
    axis = along("dim", -1)(op)
    return sample_axis.without_dims(axis, [op.dim("dim", _main(op).ndim, -1)]) if isinstance(axis, SampleAxis) else axis


@sample_rule("_masked_softmax", proof="along another dim")
def masked_softmax(op: Op) -> Placement:
    """Softmax over `dim` (the last one by default), the mask aligned with the input."""
    x = op.need("self")
    found = broadcast(op, op.values(), x.ndim)
    if isinstance(found.axes, SampleAxis) and found.axes.dim == op.dim("dim", x.ndim, -1):
        raise _refuse_along(op, found.axes.dim)
    return found.axes


@sample_rule("linalg_cross", "cross", proof="along another dim")
def cross(op: Op) -> Placement:
    """Two values combined element by element but for one dim of size 3."""
    values = op.values()
    ndim = max(v.ndim for v in values)
    found = broadcast(op, values, ndim)
    given = op.args.get("dim")
    if given is None:
        given = next((d for d in range(ndim) if op.out().shape[d] == 3), -1)
    if isinstance(found.axes, SampleAxis) and found.axes.dim == positive(given, ndim):
        raise op.refuse(f"its products run along dim {found.axes.dim}, the sample dim")
    return found.axes


def trailing(count: int | Callable[[Op], int], what: str) -> Callable[[Op], Placement]:
    """A rule maker: the op works on the last `count` dims and leaves the others alone, in place."""

    def apply(op: Op) -> Placement:
        x = _alone(op)
        if x.axis is None:
            return None
        wide = count if isinstance(count, int) else count(op)
        if x.axis.dim >= x.ndim - wide:
            raise op.refuse(f"{what} the last {wide} dims, and dim {x.axis.dim} holds the samples")
        return x.axis

    return apply


_SQUARE = """
    tril triu det linalg_det _linalg_det logdet slogdet linalg_slogdet _linalg_slogdet inverse linalg_inv linalg_inv_ex
    linalg_cholesky linalg_cholesky_ex cholesky cholesky_inverse linalg_eigh _linalg_eigh linalg_eigvalsh linalg_eig
    linalg_eigvals _linalg_eigvals linalg_svd _linalg_svd linalg_svdvals linalg_qr qr linalg_pinv pinverse matrix_exp
    linalg_matrix_exp linalg_matrix_power matrix_power linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_cond
    linalg_matrix_rank geqrf linalg_ldl_factor linalg_ldl_factor_ex
"""
sample_rule(*_SQUARE.split(), proof="trailing dims")(trailing(2, "it works on"))


@sample_rule("constant_pad_nd", "pad", "_pad_enum", "_pad_circular", proof="along another dim")
def pad(op: Op) -> Placement:
    """Dims grow, or shrink, at both ends: two amounts for each, from the last dim on."""
    x = _alone(op)
    padded = {x.ndim - 1 - k // 2 for k, amount in enumerate(op.raw("pad")) if amount != 0}
    if x.axis is not None and x.axis.dim in padded:
        raise op.refuse(f"it pads dim {x.axis.dim}, the sample dim")
    return x.axis


@sample_rule("diag_embed", proof="view")
def diag_embed(op: Op) -> Placement:
    """The last dim becomes the diagonal of two new dims."""
    x = op.need("self")
    if x.axis is None:
        return None
    if x.axis.dim == x.ndim - 1:
        raise op.refuse("it puts the sample dim on a diagonal")
    dims = sorted(positive(op.raw(n, d), x.ndim + 1) for n, d in (("dim1", -2), ("dim2", -1)))
    rest = [d for d in range(x.ndim + 1) if d not in dims]
    return sample_axis.moved(x.axis, rest[x.axis.dim])


_SOLVES = """
    linalg_solve linalg_solve_ex _linalg_solve_ex linalg_solve_triangular triangular_solve cholesky_solve
    _cholesky_solve_helper linalg_lstsq linalg_ldl_solve linalg_householder_product ormqr
"""


_BATCHED = "give the right side as [B, n, k] and the matrix as [B, n, n], a shared one by matrix.expand(B, n, n)"
_SIDES = dict.fromkeys(("linalg_solve", "linalg_solve_ex", "linalg_solve_triangular", "linalg_lu_solve"), "B")
_SIDES |= dict.fromkeys(("cholesky_solve", "lu_solve", "triangular_solve"), "self")
"""The argument of an op whose columns (left=False: rows) are right sides, each solved by itself."""


@sample_rule(*_SOLVES.split(), proof="trailing dims")
def solve(op: Op) -> Placement:
    """Matrices in the last two dims, the same leading dims in all arguments; or samples as sides of a shared matrix."""
    values = [v for v in op.values() if v.axis is not None]
    if sides := _sides(op, values):
        others = len(op.outputs()) - 1
        return (sides, *[None] * others) if others else sides
    if len({v.ndim for v in op.values()}) > 1:
        raise op.unsupported("its arguments have different numbers of dims", _BATCHED)
    if any(v.axis and v.axis.dim >= v.ndim - 2 for v in values):
        raise op.refuse("its matrices run over the sample dim")
    return Result(broadcast(op, values, values[0].ndim).axes) if values else None


def _sides(op: Op, values: Sequence[Argument]) -> SampleAxis | None:
    """Where the samples lie if they are right sides of one system and in nothing else."""
    name = _SIDES.get(op.name.removeprefix("aten.").strip("_").removesuffix("_helper"))
    if name is None or len(values) != 1 or values[0].node is not op.args[name]:
        return None
    axis, ndim = samples_of(values[0]), values[0].ndim
    if axis.dim != ndim - (1 if op.raw("left", True) else 2):
        return None
    return sample_axis.moved(axis, axis.dim + max(v.ndim for v in op.values()) - ndim)  # a matrix with more dims


@sample_rule("lu_unpack", proof="trailing dims")
def lu_unpack(op: Op) -> Placement:
    """P, L, U `[n.., :, :]` of LU `[n.., :, :]` and pivots `[n.., :]`; what is not asked for is empty."""
    lu, pivots = op.need("LU_data"), op.need("LU_pivots")
    if lu.axis is None and pivots.axis is None:
        return None
    if lu.axis is None or lu.axis != pivots.axis or lu.axis.dim >= lu.ndim - 2:
        raise op.refuse("its matrices run over the sample dim")
    return tuple(None if out.shape == (0,) else lu.axis for out in op.outputs())


@sample_rule("linalg_lu_solve", "lu_solve", proof="trailing dims")
def lu_solve(op: Op) -> Placement:
    """Matrices in the last two dims, pivots in the last one, the same leading dims in all."""
    lu, pivots = (op.value(n) or op.need(m) for n, m in (("LU", "LU_data"), ("pivots", "LU_pivots")))
    right = op.value("B") or op.need("self")
    if not op.sampled():
        return None
    if sides := _sides(op, op.sampled()):
        return sides
    if lu.axis is None or lu.axis.dim >= lu.ndim - 2 or {lu.axis} != {pivots.axis, right.axis}:
        raise op.refuse("its matrices run over the sample dim, or not all of them carry samples")
    if lu.ndim != right.ndim:
        raise op.unsupported("its arguments have different numbers of dims")
    return lu.axis


@sample_rule("renorm", proof="norm of each row")
def renorm(op: Op) -> Placement:
    """Each index of `dim` is scaled by the norm over all other dims."""
    x = op.need("self")
    if x.axis is not None and x.axis.dim != op.dim("dim", x.ndim):
        raise op.refuse(f"its norms run over dim {x.axis.dim}, the sample dim")
    return x.axis


@sample_rule("searchsorted", proof="along another dim")
def searchsorted(op: Op) -> Placement:
    """y[.., j] = the place of v[.., j] in the sorted s[.., :]."""
    ordered = op.value("sorted_sequence")
    value = op.value("self")
    if op.value("sorter") is not None:
        raise op.unsupported("it has a sorter")
    if ordered is None or ordered.axis is None:
        return value.axis if value is not None and (ordered is None or ordered.ndim == 1) else None
    if value is None or ordered.axis.dim == ordered.ndim - 1 or value.axis != ordered.axis:
        raise op.refuse("its sorted values are those of all samples")
    return value.axis


@sample_rule("_sample_dirichlet", proof="drawn along another dim")
def dirichlet(op: Op) -> Placement:
    """y[.., :] drawn with the concentrations x[.., :]."""
    x = op.need("self")
    if x.axis is not None and x.axis.dim == x.ndim - 1:
        raise op.refuse("its last dim, which sums to 1, is the sample dim")
    return x.axis
