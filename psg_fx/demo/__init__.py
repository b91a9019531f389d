"""The demo: `python -m psg_fx.demo` finds mislabelled digits by the norms of their gradients."""
