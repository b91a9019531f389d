"""What the tests of several rooms share: rows, the loop over single samples, trials of operators."""
