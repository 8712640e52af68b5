"""Algorithms that average parameters: each rank steps by itself and mixes with others now and then."""
