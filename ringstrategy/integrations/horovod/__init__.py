"""Horovod's shape for PyTorch over this package's ring; `ringstrategy.horovod` is its public name."""
