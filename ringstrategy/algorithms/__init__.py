"""Algorithms decide what is averaged (gradients or parameters), and when. They know nothing of Lightning."""
