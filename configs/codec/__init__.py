"""Hydra group `codec`."""
