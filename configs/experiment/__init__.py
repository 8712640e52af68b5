"""Hydra group `experiment`."""
