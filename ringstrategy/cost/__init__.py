"""What an exchange will cost on given machines: measured figures, and the schedules run against a clock."""

from ringstrategy.cost.model import CodecCost, Cost, Link, Machines, Work, exchange_cost
from ringstrategy.cost.step import Prediction, Profile, predict

__all__ = [
    "CodecCost",
    "Cost",
    "Link",
    "Machines",
    "Prediction",
    "Profile",
    "Work",
    "exchange_cost",
    "predict",
]
