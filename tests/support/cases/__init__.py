"""The rows of the test matrix: one small program for each way in which a parameter can meet the samples.

A row is a function of data and parameters. It becomes a module with those parameters, and a fixed nonlinear loss turns
its output into one number for each sample. A new rule needs a row here, and gets every quantity, tree and dtype.
"""

from __future__ import annotations

from support.cases.case import B, Case, wavy
from support.cases.convolutions import CONVOLUTION
from support.cases.embeddings import EMBEDDING
from support.cases.layers import LAYERS
from support.cases.linear import LINEAR
from support.cases.norms import NORM
from support.cases.pointwise import POINTWISE
from support.cases.prefixes import PREFIX
from support.cases.traps import TRAPS

__all__ = ["CASES", "B", "Case", "wavy"]

CASES = [*LINEAR, *CONVOLUTION, *EMBEDDING, *NORM, *POINTWISE, *PREFIX, *LAYERS, *TRAPS]
"""Every row."""
