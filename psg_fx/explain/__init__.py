"""What a step says of itself: as a table, as plain data, as an HTML file."""
