"""Servers keep the parameters and step them; ranks push gradients, and pull what came of them."""
