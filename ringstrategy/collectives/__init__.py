"""Floor 2: how bytes move; a collective knows nothing of parameters."""

from ringstrategy.collectives.base import Collective, mean_
from ringstrategy.collectives.direct import Direct
from ringstrategy.collectives.hierarchical import Hierarchical
from ringstrategy.collectives.native import Native
from ringstrategy.collectives.peers import Peers, connect
from ringstrategy.collectives.ring import Ring
from ringstrategy.collectives.stats import Stats

__all__ = ["Collective", "Direct", "Hierarchical", "Native", "Peers", "Ring", "Stats", "connect", "mean_"]
