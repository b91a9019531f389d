"""Gradients that a model's code takes, changes or replaces itself, in a graph."""
