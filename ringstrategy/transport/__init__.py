"""Moves bytes between ranks, and finds out which ranks there are and which were lost; knows nothing of gradients."""

from ringstrategy.transport.base import Peers
from ringstrategy.transport.connect import connect
from ringstrategy.transport.stats import Stats

__all__ = ["Peers", "Stats", "connect"]
