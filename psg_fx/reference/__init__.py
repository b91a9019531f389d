"""What the numbers should be: a float64 loop over single samples, and every quantity by its definition."""
