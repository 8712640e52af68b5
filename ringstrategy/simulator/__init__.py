"""Training of thousands of ranks in one process: decentralized, by parameter servers, and by learners of a syncer."""

from ringstrategy.simulator.learners import Learners, Pace, Workers
from ringstrategy.simulator.problems import Logistic, Problem, Quadratic
from ringstrategy.simulator.simulation import AllReduced, Simulation

__all__ = ["AllReduced", "Learners", "Logistic", "Pace", "Problem", "Quadratic", "Simulation", "Workers"]
