"""One joint graph of the forward pass and of the cotangents at the sites, as rules see them."""

from .joint_graph import differentiate

__all__ = ["differentiate"]
