"""The arguments of a call: taken apart into tensors, where the samples or their rows lie in each, and their key."""
