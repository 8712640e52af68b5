"""GPU kernels in Triton, installed as `ringstrategy.kernels`. Importing this imports neither torch nor triton."""
