"""What users ask of per-sample gradients, one class for each."""
