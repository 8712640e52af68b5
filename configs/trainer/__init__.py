"""Hydra group `trainer`."""
