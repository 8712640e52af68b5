"""Hydra group `model`."""
