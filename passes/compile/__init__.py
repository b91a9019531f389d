"""A lowered graph becomes a callable on flat tensors."""
