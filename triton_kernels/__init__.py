"""GPU kernels in Triton, installed as `ringstrategy.kernels`; torch and triton only. Importing this package imports neither."""
