"""Constants of the wire format (docs/wire-format.md), once for every device."""

from __future__ import annotations

# steps of the best uniform quantizers of 2**bits levels for a standard normal distribution (Max 1960)
GAUSSIAN_STEPS = {1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 7: 0.0569}
LARGEST_STEP = 2.0**110  # of a Gaussian's; below it, all that is decoded is finite
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32, so that 1 / scale is finite
LARGEST = 1.984375 * 2.0**127  # below it, the largest code times a scale that was rounded up is finite
