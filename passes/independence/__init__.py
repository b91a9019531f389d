"""The proof that no op mixes samples: one small rule per op, and the walk over the graph that applies them."""

from .joint import prove_joint
from .prove import prove
from .ragged.conditions import add_conditions
from .values import Result

__all__ = ["Result", "add_conditions", "prove", "prove_joint"]
