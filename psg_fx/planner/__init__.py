"""How everything asked of a parameter is computed at the least predicted cost."""
