"""The ways to contract two operands.  A new one is a class with its formula, its cost and its torch code."""

from psg_fx.planner.methods.base import Arg, Method, Pair
from psg_fx.planner.methods.dense import Dot, MatMul, Multiply
from psg_fx.planner.methods.experts import ExpertMatMul, ExpertOuter, ExpertSquares, Route
from psg_fx.planner.methods.fused import SumTiles, TileProduct, TileSquares
from psg_fx.planner.methods.onehot import Equal, Gather, Pick, Scatter
from psg_fx.planner.methods.patches import ConvWeight, GroupedConv, Shifted, WindowSum
from psg_fx.planner.methods.pixels import PixelGram
from psg_fx.planner.methods.symmetric import HalfDot, HalfGram

METHODS: tuple[Method, ...] = (
    Multiply(), MatMul(), Dot(),
    Equal(), Gather(), Scatter(), Pick(),
    GroupedConv(), Shifted(), WindowSum(), ConvWeight(), PixelGram(),
    HalfGram(), HalfDot(),
    Route(), ExpertOuter(), ExpertSquares(), ExpertMatMul(), SumTiles(),
)  # fmt: skip

FUSED: tuple[Method, ...] = (TileSquares(), TileProduct())
"""Kernels of psg_fx, offered where `Device.fused` says so."""

__all__ = ["FUSED", "METHODS", "Arg", "Method", "Pair"]
