"""What is known of a graph: facts of its values, its stages, where samples lie."""
