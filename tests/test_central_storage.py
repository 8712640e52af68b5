"""Parameters are in memory once, each rank steps a slice of them: as `ddp` does, and nothing is left of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from test_parameter_server import OPTIMIZERS, Make, everyone, in_one_process, opened, train
from test_session import process_group

from ringstrategy import CentralStorage

BY_ELEMENT: dict[str, Make] = {
    **OPTIMIZERS,
    "adagrad": lambda module: torch.optim.Adagrad(module.parameters(), 0.05),
    "asgd": lambda module: torch.optim.ASGD(module.parameters(), 0.05),
    "plain": lambda module: torch.optim.SGD(module.parameters(), 0.05),
}


@pytest.mark.parametrize(
    ("how", "more"),
    [
        ("momentum", {"clip_norm": 0.5}),
        ("adam", {"bucket_mb": 0.001}),
        ("groups", {"micro": 2}),
        ("adagrad", {}),
        ("asgd", {}),
        ("plain", {}),
    ],
)
@on_ranks(2, 3)
def test_it_is_one_process_with_all_ranks_data(how: str, more: dict[str, Any]) -> None:
    micro = more.pop("micro", 1)
    with process_group():
        ranks = dist.get_world_size()
        twin, twins = in_one_process(BY_ELEMENT[how], ranks, range(12), micro, more.get("clip_norm"))
        with opened(CentralStorage(**more), BY_ELEMENT[how]) as (session, optimizer):
            train(session, optimizer, range(12), micro)
            apart = 0.0 if ranks == 2 and "clip_norm" not in more else 1e-6
            rows = everyone(session.module)
            assert all(torch.equal(row, rows[0]) for row in rows)
            for mine, theirs in zip(session.module.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=apart)
            assert not optimizer.state, "it is in shared memory"
            within = optimizer.state_dict()["state"]
        after = optimizer.state_dict()["state"]
        expected = twins.state_dict()["state"]
        assert within.keys() == after.keys() == {key for key, state in expected.items() if state}
        for key in after:
            for name, value in expected[key].items():
                for found in (within[key][name], after[key][name]):
                    torch.testing.assert_close(found, value, rtol=0, atol=apart)
