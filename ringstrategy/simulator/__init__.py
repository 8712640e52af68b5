"""Decentralized training of thousands of ranks in one process."""

from ringstrategy.simulator.problems import Logistic, Problem, Quadratic
from ringstrategy.simulator.simulation import AllReduced, Simulation

__all__ = ["AllReduced", "Logistic", "Problem", "Quadratic", "Simulation"]
