"""How values are summed over ranks: a collective is a schedule, and knows nothing of parameters."""

from ringstrategy.collectives.base import Collective, Summand, mean_
from ringstrategy.collectives.by_size import BySize
from ringstrategy.collectives.direct import Direct
from ringstrategy.collectives.hierarchical import Hierarchical
from ringstrategy.collectives.native import Native
from ringstrategy.collectives.ring import Ring

__all__ = ["BySize", "Collective", "Direct", "Hierarchical", "Native", "Ring", "Summand", "mean_"]
