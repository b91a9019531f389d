"""From a model and a loss to one functional ATen graph with a symbolic batch size."""
