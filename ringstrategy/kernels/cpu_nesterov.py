"""A step with Nesterov momentum on a CPU: one pass over the memory, compiled by Numba."""

from __future__ import annotations

import numpy as np

from ringstrategy.kernels.jit import kernel


@kernel()
def nesterov(values, gradients, momenta, lr, momentum, first, last):
    """Step [first, last). Reads 12 bytes a value and writes 8; in torch it is seven passes. All are float32.

    Numba does not fuse a product and a sum, so these are the bits of the reference on every processor.
    """
    for i in range(first, last):
        kept = momenta[i] * momentum + gradients[i]
        momenta[i] = kept
        values[i] -= np.float32(kept * momentum + gradients[i]) * lr
