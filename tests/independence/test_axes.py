"""The algebra of sample axes, against arrays that hold the number of the sample at every place."""

import itertools
import math
import random

import numpy as np
import pytest
import sympy

from psg_fx.graph import sample_axis
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.sample_axis import Misfit, Single, single

B = sympy.Symbol("s0", integer=True, positive=True)
SIZE = 5


def ids(shape: tuple[int, ...], axis: SampleAxis) -> np.ndarray:
    """An array of the single shape at batch size 5 whose elements are the numbers of their samples."""
    line = np.tile(np.repeat(np.arange(SIZE), axis.inner), axis.outer)
    full = [size * SIZE if d == axis.dim else size for d, size in enumerate(shape)]
    return np.broadcast_to(line.reshape([-1 if d == axis.dim else 1 for d in range(len(shape))]), full).copy()


def found(array: np.ndarray, dim: int, factor: int) -> SampleAxis | None:
    """The axis of an id array whose dim `dim` has factor * 5 entries, by trying all; None if there is none."""
    for inner in range(1, factor + 1):
        if factor % inner == 0:
            axis = SampleAxis(dim, factor // inner, inner)
            shape = tuple(s // SIZE if d == dim else s for d, s in enumerate(array.shape))
            if np.array_equal(ids(shape, axis), array):
                return axis
    return None


def random_value(rng: random.Random) -> tuple[tuple[int, ...], SampleAxis]:
    ndim = rng.randint(1, 4)
    axis = SampleAxis(rng.randrange(ndim), rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 4]))
    shape = [rng.choice([1, 2, 3, 4]) for _ in range(ndim)]
    shape[axis.dim] = axis.outer * axis.inner
    return tuple(shape), axis


def factorisations(number: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(number,)]
    return [
        (d, *rest) for d in range(1, number + 1) if number % d == 0 for rest in factorisations(number // d, parts - 1)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_views_against_arrays(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        shape, axis = random_value(rng)
        array = ids(shape, axis)
        new = rng.choice(factorisations(math.prod(shape), rng.randint(1, 4)))
        dim = rng.randrange(len(new))
        full = [s * SIZE if d == dim else s for d, s in enumerate(new)]
        truth = found(array.reshape(full), dim, new[dim])
        try:
            assert sample_axis.through_view(axis, shape, Single(new, dim)) == truth
        except Misfit:
            assert truth is None


@pytest.mark.parametrize("seed", range(20))
def test_permutations_reductions_and_cuts_against_arrays(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        shape, axis = random_value(rng)
        array, ndim, factor = ids(shape, axis), len(shape), axis.outer * axis.inner
        order = rng.sample(range(ndim), ndim)
        moved = sample_axis.through_permute(axis, order)
        assert moved == found(array.transpose(order), order.index(axis.dim), factor)
        first, second = rng.randrange(-ndim, ndim), rng.randrange(-ndim, ndim)
        swapped = sample_axis.through_transpose(axis, ndim, first, second)
        assert np.array_equal(ids(_swap(shape, first, second), swapped), array.swapaxes(first, second))
        source, target = rng.randrange(ndim), rng.randrange(ndim)
        shifted = sample_axis.through_movedim(axis, ndim, [source], [target])
        assert shifted == found(np.moveaxis(array, source, target), shifted.dim, factor)
        place = rng.randrange(-ndim - 1, ndim + 1)
        grown = sample_axis.through_unsqueeze(axis, ndim, place)
        assert grown == found(np.expand_dims(array, place), grown.dim, factor)
        gone = [d for d in range(ndim) if d != axis.dim and rng.random() < 0.5]
        kept = sample_axis.through_reduction(axis, gone, keepdim=False)
        assert kept is not None
        assert kept == found(array.max(tuple(gone)) if gone else array, kept.dim, factor)
        assert sample_axis.through_reduction(axis, [*gone, axis.dim], keepdim=True) is None


def _swap(shape: tuple[int, ...], first: int, second: int) -> tuple[int, ...]:
    sizes = list(shape)
    sizes[first], sizes[second] = sizes[second], sizes[first]
    return tuple(sizes)


@pytest.mark.parametrize(("outer", "inner", "times"), list(itertools.product([1, 2], [1, 3], [1, 2, 3])))
def test_repeats_joins_and_cuts_against_arrays(outer: int, inner: int, times: int) -> None:
    axis = SampleAxis(0, outer, inner)
    array = ids((outer * inner,), axis)
    assert sample_axis.fold(axis, times, outside=True) == found(np.tile(array, times), 0, outer * inner * times)
    assert sample_axis.fold(axis, times, outside=False) == found(np.repeat(array, times), 0, outer * inner * times)
    joined = sample_axis.join([axis] * times)
    assert np.array_equal(ids((outer * inner * times,), joined), np.concatenate([array] * times))
    for start, stop in itertools.combinations(range(outer * inner + 1), 2):
        piece = array[start * SIZE : stop * SIZE]
        try:
            assert np.array_equal(ids((stop - start,), sample_axis.cut(axis, start, stop)), piece)
        except Misfit:
            assert inner > 1


def test_join_refuses_different_layouts() -> None:
    with pytest.raises(Misfit, match="laid out differently"):
        sample_axis.join([SampleAxis(0, 1, 2), SampleAxis(0, 2, 1)])


def test_single_reads_shapes() -> None:
    assert single([4 * B, 3], B) == Single((4, 3), 0)
    assert single([2, 3], B) == Single((2, 3), None)
    assert single([], B) == Single(())
    for shape, why in (
        ([B, B], "each sample meets every other"),
        ([B + 1], "B \\+ 1 is not a whole multiple"),
        ([sympy.Symbol("u0")], "depends on the data"),
    ):
        with pytest.raises(Misfit, match=why):
            single(shape, B)


def test_a_fold_in_the_wrong_order_is_refused() -> None:
    with pytest.raises(Misfit, match="a row of it holds parts of several samples"):
        sample_axis.through_view(SampleAxis(0), (1, 7, 3), Single((7, 1, 3), 1))


def test_of_no_elements_any_place_is_true() -> None:
    assert sample_axis.through_view(SampleAxis(0), (1, 0, 3), Single((1, 0), 0)) == SampleAxis(0)
    assert sample_axis.through_view(SampleAxis(1), (0, 1), Single((1, 0), 0)) == SampleAxis(0)
    with pytest.raises(Misfit, match="empty"):
        sample_axis.through_view(SampleAxis(1), (0, 1, 2), Single((0, 2), 1))
