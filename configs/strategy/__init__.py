"""Hydra group `strategy`."""
