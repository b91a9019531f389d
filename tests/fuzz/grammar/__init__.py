"""The grammar: what a random program is made of.  Each function writes one instruction and says what comes out."""

from fuzz.grammar import along, attention, layers, losses, mixing, pointwise, recurrent, regions, views
from fuzz.grammar.table import FAMILIES, OPS

__all__ = [
    "FAMILIES",
    "OPS",
    "along",
    "attention",
    "layers",
    "losses",
    "mixing",
    "pointwise",
    "recurrent",
    "regions",
    "views",
]
