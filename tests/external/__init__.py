"""psg_fx on models and test suites that others wrote."""
