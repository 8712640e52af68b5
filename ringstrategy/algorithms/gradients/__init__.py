"""Algorithms that average gradients: after each step all ranks hold the same parameters."""
