"""From a plan to nodes of the graph."""
