"""Hydra configurations, installed as `ringstrategy.configs`: one YAML a part, every one with a `_target_`."""
