"""One joint graph of the forward pass and of the cotangents at the sites, as rules see them."""

from . import replaced  # noqa: F401  (says what runs in the place of ops)
from .joint_graph import differentiate

__all__ = ["differentiate"]
