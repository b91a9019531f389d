"""The cost model: its flops are those torch counts, its formulas take symbols, and more work never takes less time."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch.utils.flop_counter import FlopCounterMode

from psg_fx.algebra.network import (
    Dense,
    Kind,
    Leaf,
    Members,
    Network,
    OneHot,
    Patches,
    Routed,
    Source,
    Symmetric,
    TileSums,
    inner,
)
from psg_fx.planner import rates
from psg_fx.planner.cost import Device, Work
from psg_fx.planner.crossover import _changed, crossover, resized
from psg_fx.planner.expr import Expr, peak_bytes, seconds
from psg_fx.planner.methods import METHODS, Arg, Pair
from psg_fx.planner.methods.dense import MatMul, SumOfOuter
from psg_fx.planner.methods.fused import TileProductHere
from psg_fx.planner.methods.onehot import Equal
from psg_fx.planner.methods.patches import ConvWeight, GroupedConv
from psg_fx.planner.methods.symmetric import HalfGram
from psg_fx.planner.rates import CPU, H100
from psg_fx.planner.trees import trees

F32 = torch.float32
SIZES = {"b": 3, "t": 10, "s": 10, "i": 4, "o": 6}


def dense(axes: str) -> Arg:
    return Arg(tuple(axes), Dense(), F32)


def tensor(axes: str, sizes: dict[str, int]) -> torch.Tensor:
    return torch.randn([sizes[a] for a in axes])


def counted(method: Any, pair: Pair, a: torch.Tensor, b: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        method.emit(pair, a, b)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [("bti", "bto", "boi"), ("bti", "bsi", "bts"), ("bti", "bto", "oi"), ("ti", "to", "io"), ("bti", "oi", "bto")],
)
def test_matmul_flops(a: str, b: str, out: str) -> None:
    pair = Pair(dense(a), dense(b), tuple(out), SIZES)
    assert MatMul().applies(pair)
    assert MatMul().work(pair).flops == counted(MatMul(), pair, tensor(a, SIZES), tensor(b, SIZES))


@pytest.mark.parametrize(("channels", "side", "patches"), [(512, 1, True), (256, 2, True), (64, 8, False)])
def test_large_gradients_of_few_positions_are_products_with_patches(channels: int, side: int, patches: bool) -> None:
    """Summed over 16 samples: what a library takes to write such a gradient counts beside its flops."""
    kernel, space = 9 * channels, side**2
    form = Patches((3, 3), (1, 1), (1, 1), (1, 1), groups=1, space=(side, side), out_space=(side, side))
    sizes = {"b": 16, "t": space, "g": 1, "i": kernel, "o": channels}
    as_convolution = Pair(Arg(tuple("btgi"), form, F32), dense("bgot"), tuple("goi"), sizes)
    as_product = Pair(dense("bti"), dense("bto"), tuple("oi"), {axis: sizes[axis] for axis in "btio"})
    formed = CPU.seconds(Work(0, 4 * 16 * channels * space, 4 * 16 * kernel * space))
    cheaper = MatMul().seconds(as_product, CPU) + formed < ConvWeight().seconds(as_convolution, CPU)
    assert cheaper == patches


@pytest.mark.parametrize("stored", ["bt", "tb"])
def test_places_are_summed_as_they_lie_in_memory(stored: str) -> None:
    """The larger operand is not copied to have one axis in place of two, whichever of them comes first."""
    sizes = {"b": 3, "t": 5, "i": 4, "o": 6}
    x, y = (torch.randn(*(sizes[axis] for axis in stored), features) for features in (4, 6))
    if stored == "tb":
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    pair = Pair(dense("bti"), dense("bto"), tuple("io"), sizes)
    left, right = MatMul().operands(pair, x, y)
    assert right.data_ptr() == y.data_ptr()
    assert left.data_ptr() == x.data_ptr()
    torch.testing.assert_close(MatMul().emit(pair, x, y), torch.einsum("bti,bto->io", x, y))


CONVOLUTION = Patches(
    kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1, space=(5, 5), out_space=(5, 5)
)
CONVOLUTION_SIZES = {"b": 3, "t": 25, "g": 1, "i": 4 * 9, "o": 6}


@pytest.mark.parametrize(("method", "out"), [(ConvWeight(), "goi"), (GroupedConv(), "bgoi")], ids=["summed", "grouped"])
def test_convolution_flops(method: Any, out: str) -> None:
    """Padded positions count, as torch counts them."""
    patches = Arg(tuple("btgi"), CONVOLUTION, F32)
    pair = Pair(patches, dense("bgot"), tuple(out), CONVOLUTION_SIZES)
    assert method.applies(pair)
    x, grad = torch.randn(3, 1, 4, 5, 5), torch.randn(3, 1, 6, 25)
    assert method.work(pair).flops == counted(method, pair, x, grad)


def test_equality_reads_ids_once() -> None:
    hot = [Arg(tuple(axes), OneHot(7), F32) for axes in ("btv", "bsv")]
    work = Equal().work(Pair(*hot, tuple("bts"), {"b": 3, "t": 10, "s": 5, "v": 7}))
    assert (work.read, work.written) == (8 * (3 * 10 + 3 * 5), 4 * 3 * 10 * 5)


def symbolic(names: str) -> dict[str, sympy.Symbol]:
    return {name: sympy.Symbol(name.upper(), positive=True, integer=True) for name in names}


PAIRS = [
    (dense("bti"), dense("bto"), "boi"),
    (dense("bti"), dense("bto"), "btio"),
    (dense("boi"), dense("boi"), "b"),
    (Arg(tuple("btv"), OneHot(7), F32), Arg(tuple("bsv"), OneHot(7), F32), "bts"),
    (Arg(tuple("btv"), OneHot(7), F32), dense("btd"), "bvd"),
    (Arg(tuple("btv"), OneHot(7), F32), dense("bvd"), "btd"),
    (Arg(tuple("btgi"), CONVOLUTION, F32), dense("bgot"), "bgoi"),
    (Arg(tuple("btgi"), CONVOLUTION, F32), dense("bgot"), "goi"),
    (Arg(tuple("btgi"), CONVOLUTION, F32), Arg(tuple("bsgi"), CONVOLUTION, F32), "bgts"),
    (dense("bti"), dense("bsi"), "bts"),
    (Arg(tuple("bts"), Symmetric(16), F32), Arg(tuple("bts"), Symmetric(16), F32), "b"),
    (Arg(tuple("sb"), Members(7), F32), dense("bsi"), "bi"),
    (Arg(tuple("btv"), OneHot(7), F32), dense("bti"), "btvi"),
    (Arg(tuple("btvi"), Routed(7, 3), F32), dense("bto"), "vio"),
    (Arg(tuple("btvi"), Routed(7, 3), F32), dense("bto"), "bvio"),
    (Arg(tuple("btvi"), Routed(7, 3), F32), dense("vio"), "bto"),
    (Arg(tuple("bvio"), TileSums(), F32), Arg(tuple("bvio"), TileSums(), F32), "b"),
]  # fmt: skip


def test_formulas_take_symbols() -> None:
    """Every method's work at symbols, with numbers put in, is its work at the numbers."""
    numbers = {"b": 3, "t": 25, "s": 5, "i": 36, "o": 6, "v": 7, "d": 2, "g": 2}
    met = set()
    for a, b, out in PAIRS:
        names = "".join(dict.fromkeys("".join(a.axes + b.axes)))
        symbols = symbolic(names)
        values = {symbols[n]: numbers[n] for n in names}
        same = {"self_product": out == "bts", "same": a.form == b.form == TileSums()}
        at_symbols = Pair(a, b, tuple(out), symbols, **same)
        at_numbers = Pair(a, b, tuple(out), {n: numbers[n] for n in names}, **same)
        for method in METHODS:
            if not method.applies(at_symbols):
                continue
            met.add(method.name)
            general, special = method.work(at_symbols), method.work(at_numbers)
            for field in ("flops", "read", "written"):
                there = sympy.sympify(getattr(general, field)).subs(values)
                assert float(there) == float(getattr(special, field)), (method, field)
    assert met == {method.name for method in METHODS}


def test_few_places_are_written_out_on_a_cpu() -> None:
    """A product of few places is cheaper written out; one of many, or over samples, is not."""

    def pair(places: int, out: str) -> Pair:
        return Pair(dense("bti"), dense("bto"), tuple(out), {"b": 8, "t": places, "i": 32, "o": 32})

    few = pair(4, "boi")
    assert SumOfOuter().applies(few)
    assert SumOfOuter().seconds(few, rates.CPU) < MatMul().seconds(few, rates.CPU)
    assert not SumOfOuter().applies(pair(8, "boi"))
    assert not SumOfOuter().applies(pair(4, "oi"))


@pytest.mark.parametrize(("samples", "fetched"), [(2, False), (64, True)])
def test_what_a_library_writes_over_is_fetched(samples: int, fetched: bool) -> None:
    """On a CPU, of a result that no cache holds; not by an op that writes past the caches, nor on CUDA."""
    p = Pair(dense("bti"), dense("bto"), tuple("boi"), {"b": samples, "t": 8, "i": 256, "o": 256})
    own, cached = TileProductHere().seconds(p, rates.CPU), rates.CPU.seconds(MatMul().work(p))
    assert (MatMul().seconds(p, rates.CPU) > cached) is fetched
    assert (MatMul().seconds(p, rates.CPU) > own) is fetched
    assert MatMul().seconds(p, H100) == H100.seconds(MatMul().work(p))


def test_matmul_formula() -> None:
    symbols = symbolic("btio")
    work = MatMul().work(Pair(dense("bti"), dense("bto"), tuple("boi"), symbols))
    b, t, i, o = (symbols[name] for name in "btio")
    assert sympy.expand(work.flops - 2 * b * t * i * o) == 0
    assert sympy.expand(work.read - 4 * b * t * (i + o)) == 0
    assert sympy.expand(work.written - 4 * b * i * o) == 0


@pytest.mark.parametrize("device", [CPU, H100], ids=lambda d: d.name)
@pytest.mark.parametrize("field", ["flops", "read", "written", "calls"])
@pytest.mark.parametrize("kind", ["gemm", "bmm", "conv", "pointwise"])
def test_more_work_takes_no_less_time(device: Device, field: str, kind: str) -> None:
    values = {"flops": 10**9, "read": 10**8, "written": 10**7, "calls": 1}
    times = [
        device.seconds(Work(**(values | {field: values[field] * factor}), kind=kind)) for factor in (1, 2, 10, 1000)
    ]
    assert times == sorted(times)
    assert times[-1] > times[0]


def test_a_square_reads_its_operand_once() -> None:
    once = Pair(dense("boi"), dense("boi"), ("b",), SIZES, same=True)
    twice = Pair(dense("boi"), dense("boi"), ("b",), SIZES)
    assert 2 * once.moved()[0] == twice.moved()[0]


def test_devices() -> None:
    assert rates.device("cuda") is H100
    assert rates.device("cpu") is CPU


def linear(t: int, i: int, o: int) -> Network:
    """x[b,t,i] ȳ[b,t,o] -> [b,o,i] for symbolic b."""
    x = Leaf("x", (Source(Kind.ACTIVATION, "x"),), "", tuple("bti"), (BATCH_SIZE, sympy.Integer(t), sympy.Integer(i)))
    grad = Leaf("ȳ", (Source(Kind.COTANGENT, "y"),), "", tuple("bto"), (BATCH_SIZE, sympy.Integer(t), sympy.Integer(o)))
    return Network((x, grad), tuple("boi"))


BATCH_SIZE = sympy.Symbol("N", positive=True, integer=True)
FLOPS_ONLY = Device("cpu", {("bmm", F32): 1.0, ("pointwise", F32): 1e30}, 1e30, 0.0, 0.0, {})


def norm_trees(network: Network, size: int) -> tuple[Network, dict[str, Expr]]:
    doubled = inner(network, network)
    found = trees(doubled, lambda e: int(sympy.sympify(e).subs(BATCH_SIZE, size)))
    return doubled, {f"{tree}{' by half' * _is_by_half(tree)}": tree for tree in found}


def _is_by_half(tree: Expr) -> bool:
    return any(isinstance(node.arg.form, Symmetric) for node in tree.nodes.values())


GRAM, HALF, MATERIALISED = "((x·x)·(ȳ·ȳ))", "((x·x)·(ȳ·ȳ)) by half", "(x·ȳ)²"


@pytest.mark.parametrize("t", [40, 500])
@pytest.mark.parametrize(("tree", "border"), [(GRAM, 200), (HALF, 267)])
def test_gram_against_materialised(t: int, tree: str, border: int) -> None:
    """2BT²(I+O) < 2BTIO below T = IO/(I+O), from either side; three quarters of the flops move it by a third."""
    network, found = norm_trees(linear(t, 300, 600), 8)
    at = crossover(network, found[tree], found[MATERIALISED], "t", BATCH_SIZE, 8, FLOPS_ONLY)
    assert at in (border, border + 1)
    assert crossover(network, found[tree], found[MATERIALISED], "b", BATCH_SIZE, 8, FLOPS_ONLY) is None


def test_half_gram_flops() -> None:
    sizes = SIZES | {"t": 64, "s": 64}
    pair = Pair(dense("bti"), dense("bsi"), tuple("bts"), sizes, self_product=True)
    x = tensor("bti", sizes)
    assert HalfGram().applies(pair)
    assert HalfGram().work(pair).flops == counted(HalfGram(), pair, x, x)


def test_half_gram_needs_a_tensor_and_itself() -> None:
    sizes = SIZES | {"t": 64, "s": 64, "i": 64}
    assert not HalfGram().applies(Pair(dense("bti"), dense("bsi"), tuple("bts"), sizes))
    assert not HalfGram().applies(Pair(dense("bti"), dense("bis"), tuple("bts"), sizes, self_product=True))
    assert not HalfGram().applies(Pair(dense("bti"), dense("bsi"), tuple("bts"), SIZES, self_product=True))


def test_resizing_is_building_at_another_size() -> None:
    _, small = norm_trees(linear(20, 30, 40), 8)
    _, large = norm_trees(linear(50, 30, 40), 8)
    for name in (GRAM, MATERIALISED):
        assert seconds(resized(small[name], "t", 50), CPU) == seconds(large[name], CPU)
        assert resized(small[name], "t", 50).key == small[name].key


def test_peak_bytes() -> None:
    """Materialised: x·ȳ and the result. Gram: both Gram matrices and the result."""
    _, found = norm_trees(linear(20, 30, 40), 8)
    assert peak_bytes(found[MATERIALISED]) == 4 * (8 * 30 * 40 + 8)
    assert peak_bytes(found[GRAM]) == 4 * (2 * 8 * 20 * 20 + 8)


@pytest.mark.parametrize("start", [3, 4, 5, 100])
def test_a_border_next_to_the_least_size_is_found(start: int) -> None:
    assert _changed(lambda n: n < 3, start, 0.5) == 3
    assert _changed(lambda n: n < 2, start, 0.5) is None
    assert _changed(lambda n: n > 2 * start, start, 2.0) == 2 * start + 1
