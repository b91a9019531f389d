"""The algebra of per-sample gradients: networks, the sites they come from, the rules that make them, what is asked."""
