"""Norms of the whole model and weighted sums, written for many parameters at once."""
