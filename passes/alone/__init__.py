"""What the code computes for one sample alone, beside what its graph has."""
