"""How bytes get from rank to rank, who the ranks are, and who of them was lost; knows nothing of gradients."""

from ringstrategy.transport.base import Peers
from ringstrategy.transport.connect import connect
from ringstrategy.transport.stats import Stats

__all__ = ["Peers", "Stats", "connect"]
