"""The proof that no op mixes samples: one small rule per op, and the walk over the graph that applies them."""

from psg_fx.passes.independence.joint import prove_joint
from psg_fx.passes.independence.prove import prove
from psg_fx.passes.independence.values import Result, symbolic_values

__all__ = ["Result", "prove", "prove_joint", "symbolic_values"]
