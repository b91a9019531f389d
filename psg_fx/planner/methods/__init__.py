"""The ways to contract two operands.  A new one is a class with its formula, its cost and its torch code."""

from psg_fx.planner.cost import Fused
from psg_fx.planner.methods.base import Arg, Method, Pair
from psg_fx.planner.methods.dense import Dot, MatMul, Multiply, RoundedMatMul, SumOfOuter
from psg_fx.planner.methods.experts import ExpertMatMul, ExpertOuter, ExpertSquares, Route, RouteMembers
from psg_fx.planner.methods.fused import (
    RoundedProductHere,
    RoundedTileProduct,
    SumTiles,
    TileProduct,
    TileProductHere,
    TileSquares,
    TileSquaresHere,
)
from psg_fx.planner.methods.fused_patches import PatchProduct, PatchSquares
from psg_fx.planner.methods.grams import GramDot, GramDotHere, NotFormed, NotFormedHere
from psg_fx.planner.methods.onehot import Equal, Gather, Pick, Scatter
from psg_fx.planner.methods.patches import ConvWeight, GroupedConv, Shifted, WindowSum
from psg_fx.planner.methods.pixels import PixelGram
from psg_fx.planner.methods.symmetric import HalfDot, HalfGram

METHODS: tuple[Method, ...] = (
    Multiply(), MatMul(), Dot(), SumOfOuter(),
    Equal(), Gather(), Scatter(), Pick(),
    GroupedConv(), Shifted(), WindowSum(), ConvWeight(), PixelGram(),
    HalfGram(), HalfDot(),
    Route(), RouteMembers(), ExpertOuter(), ExpertSquares(), ExpertMatMul(), SumTiles(),
)  # fmt: skip

TIMED: tuple[Method, ...] = (TileSquares(), TileProduct(), NotFormed(), GramDot())
"""Kernels of psg_fx that were timed in whole steps on a device."""

FUSED: tuple[Method, ...] = (*TIMED, PatchSquares(), PatchProduct())
"""All kernels of psg_fx for a CUDA device."""

COMPILED: tuple[Method, ...] = (NotFormedHere(), GramDotHere(), TileSquaresHere(), TileProductHere())
"""Kernels of psg_fx in C++."""

OFFERED = {
    Fused.NONE: METHODS, Fused.TIMED: METHODS + TIMED, Fused.ALL: METHODS + FUSED, Fused.COMPILED: METHODS + COMPILED,
}  # fmt: skip
"""What plans choose from: `Device.offered`."""

ROUNDED = {
    Fused.NONE: (RoundedMatMul(),), Fused.TIMED: (RoundedMatMul(), RoundedTileProduct()),
    Fused.ALL: (RoundedMatMul(), RoundedTileProduct()), Fused.COMPILED: (RoundedMatMul(), RoundedProductHere()),
}  # fmt: skip
"""What gradients may be kept by, too, where `Device.rounded` says so."""

__all__ = ["FUSED", "METHODS", "OFFERED", "ROUNDED", "Arg", "Method", "Pair"]
