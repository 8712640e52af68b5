"""Flat buffers of gradients that are exchanged together, and their compression errors."""
