"""Hydra group `optimizer`: what steps the model's parameters."""
