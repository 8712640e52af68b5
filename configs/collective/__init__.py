"""Hydra group `collective`."""
