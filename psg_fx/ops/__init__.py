"""Ops beside torch's own, and ops for every sample at once."""
