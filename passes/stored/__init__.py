"""Lowered graphs on disk: what the passes after capture make of a captured graph is found there by another process."""

from .store import Entry, entry_of

__all__ = ["Entry", "entry_of"]
