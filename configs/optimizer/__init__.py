"""Hydra group `outer`: the outer optimizer of DiLoCo."""
