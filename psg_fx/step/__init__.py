"""A compiled step: found by what it depends on, bound to the model's state, and run."""
