"""Measurements: time and memory of a step, rates of a device, single trees of a plan."""
