"""The communication thread runs tasks in order, stops at the first that fails, and keeps nothing of what is done."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from ringstrategy.transport.worker import Worker


def _nothing() -> None:
    return


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_task_kept_is_gone_when_it_was_waited_for(fails: bool) -> None:
    worker = Worker("test")
    for _ in range(1 if fails else 200):
        tensor = torch.zeros(3)
        memory = weakref.ref(tensor)

        def task(kept: torch.Tensor = tensor) -> None:
            if fails:
                raise ValueError(str(len(kept)))

        ticket = worker.submit(task, _nothing)
        del tensor, task
        if fails:
            with pytest.raises(ValueError, match="3"):
                ticket.wait()
        else:
            ticket.wait()
            assert memory() is None
    assert worker.close(60)


def test_nothing_runs_after_a_task_that_failed() -> None:
    worker, ran = Worker("test"), []
    error = ValueError("first")

    def fails() -> None:
        ran.append("fails")
        raise error

    before = worker.submit(lambda: ran.append("before"), _nothing)
    tickets = [worker.submit(task, _nothing) for task in (fails, lambda: ran.append("after"), fails)]
    before.wait()
    for ticket in tickets:
        with pytest.raises(ValueError, match="first") as caught:
            ticket.wait()
        assert caught.value is error
    assert worker.close(60)
    assert ran == ["before", "fails"]


def test_who_waits_looks_around_and_may_give_up_and_a_task_that_does_not_end_is_noticed() -> None:
    worker, end = Worker("test"), threading.Event()

    def look_around() -> None:
        raise TimeoutError("seen")

    ticket = worker.submit(end.wait, look_around)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match="seen"):
        ticket.wait()
    assert not worker.close(0.01)
    end.set()
    assert worker.close(60)


def test_autograd_sees_no_task() -> None:
    worker, modes = Worker("test"), list[bool]()
    worker.submit(lambda: modes.append(torch.is_grad_enabled()), _nothing).wait()
    assert modes == [False]
    assert worker.close(60)
