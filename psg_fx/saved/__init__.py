"""A step as a file: what it says of itself, how it is written, how it is read."""
