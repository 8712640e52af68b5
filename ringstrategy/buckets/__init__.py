"""Flat buffers of gradients that travel together, and what compression lost of them."""
