"""Axes of rows, of which each sample has any number: what joins them, and what values must show at every call."""
