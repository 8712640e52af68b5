"""Doors: what drives an algorithm from within a framework's training loop."""
