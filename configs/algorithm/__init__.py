"""Hydra group `algorithm`."""
