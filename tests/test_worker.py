"""The communication thread keeps nothing of a task that is done, or failed, once somebody has waited for it."""

from __future__ import annotations

import weakref

import pytest
import torch

from ringstrategy.transport.worker import Worker


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_task_kept_is_gone_when_it_was_waited_for(fails: bool) -> None:
    worker = Worker("test")
    for _ in range(1 if fails else 200):
        tensor = torch.zeros(3)
        memory = weakref.ref(tensor)

        def task(kept: torch.Tensor = tensor) -> None:
            if fails:
                raise ValueError(str(len(kept)))

        ticket = worker.submit(task, lambda: None)
        del tensor, task
        if fails:
            with pytest.raises(ValueError, match="3"):
                ticket.wait()
        else:
            ticket.wait()
            assert memory() is None
    assert worker.close(10)
