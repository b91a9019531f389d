"""The ways to contract two operands.  A new one is a class with its formula, its cost and its torch code."""

from .base import Arg, Method, Pair
from .dense import Dot, MatMul, Multiply
from .onehot import Equal, Gather, Scatter
from .patches import ConvWeight, GroupedConv, Shifted, WindowSum
from .pixels import PixelGram
from .symmetric import HalfDot, HalfGram

METHODS: tuple[Method, ...] = (
    Multiply(), MatMul(), Dot(),
    Equal(), Gather(), Scatter(),
    GroupedConv(), Shifted(), WindowSum(), ConvWeight(), PixelGram(),
    HalfGram(), HalfDot(),
)  # fmt: skip

__all__ = ["METHODS", "Arg", "Method", "Pair"]
