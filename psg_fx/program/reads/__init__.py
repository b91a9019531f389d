"""What code reads and calls beside its arguments, observed while it is captured, and walked over afterwards."""
