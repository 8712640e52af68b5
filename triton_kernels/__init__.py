"""GPU kernels in Triton, installed as `ringstrategy.kernels.triton`; importing this imports no triton."""
