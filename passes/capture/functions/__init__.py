"""Torch's functions as they are written while a model is captured, so that a graph of samples comes of them."""
