"""Hydra group `topology`."""
