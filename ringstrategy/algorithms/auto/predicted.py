"""The cost model's prediction for each candidate, the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from torch.nn import Parameter

from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.codecs.base import Codec
from ringstrategy.cost.model import Machines
from ringstrategy.cost.step import Profile, predict
from ringstrategy.transport.agree import all_gather_floats
from ringstrategy.transport.base import Peers


def seconds_of_each(
    candidates: Iterable[AllReduce],
    without: Collection[Codec],
    parameters: Mapping[str, Parameter],
    machines: Machines,
    profile: Profile,
    peers: Peers,
) -> dict[int, float]:
    """Seconds of a step, by place of the candidate, as rank 0 predicts them. Of equal candidates only the first.

    Args:
        candidates: in order of their places.
        without: codecs whose candidates are left out.
        parameters: whose gradients travel in buckets.
        machines: as measured.
        profile: of the step.
        peers: all of whom call it.
    """
    seconds, seen = [], set()
    for candidate in candidates:
        if candidate.codec in without:
            seconds.append(math.inf)
            continue
        prediction = predict(candidate, parameters, machines, profile)
        same = (candidate.codec, type(candidate.collective), prediction)
        seconds.append(math.inf if same in seen else prediction.seconds)
        seen.add(same)
    first = all_gather_floats(peers, seconds)[0]
    return {place: seconds for place, seconds in enumerate(first) if seconds < math.inf}
