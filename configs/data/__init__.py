"""Hydra group `data`."""
