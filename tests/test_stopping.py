"""A signal to one rank: all ranks stop at the same batch, and what they save is all that a later run needs."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from pool import Pool
from test_strategy import Net, fit
from torch import nn

from ringstrategy import AllReduce, BlockInt, Gossip, RingStrategy
from ringstrategy.integrations.lightning import stopping
from ringstrategy.integrations.lightning.stopping import _GO_ON, _REQUEUE, _STOP, _TAKE_IN, Stopping

STEPS = 12  # of a whole run: two epochs


class Signals(Callback):
    """One rank gets the signal at the end of a batch."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            os.kill(os.getpid(), signal.SIGTERM)


def strategies() -> dict[str, RingStrategy]:
    return {
        "ring": RingStrategy(),
        "feedback": RingStrategy(AllReduce(BlockInt(4), error_feedback=True)),
        "gossip": RingStrategy(Gossip()),
    }


def deep() -> Net:
    torch.manual_seed(int(os.environ["RANK"]))
    return Net(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)))


def _stop_and_go_on(kind: str, rank: int, folder: str, save_last: Any) -> tuple[int, int]:
    """Beside the last checkpoint of another run. Returns where it stopped, and where the run that goes on ended."""
    stopping._LOOK_SECONDS = 0.0  # or rank 0 would not look before the end
    before = signal.getsignal(signal.SIGTERM)
    saver = ModelCheckpoint(folder, save_last=save_last, every_n_epochs=10)
    with pytest.raises(SIGTERMException):
        fit(strategies()[kind], deep(), callbacks=[saver, Signals(rank, 6)], enable_checkpointing=True)
    assert signal.getsignal(signal.SIGTERM) == before
    files = sorted(path.name for path in Path(folder).iterdir() if path.suffix == ".ckpt")
    assert files == ["last-v1.ckpt", "last.ckpt"]
    saved = Path(folder) / "last-v1.ckpt"
    stopped = torch.load(saved, weights_only=True)["global_step"]
    resumed = fit(strategies()[kind], deep(), ckpt_path=str(saved))
    if stopped == STEPS // 2:  # within an epoch Lightning itself begins with the epoch's first batch
        undisturbed = fit(strategies()[kind], deep()).lightning_module.state_dict()
        for name, value in resumed.lightning_module.state_dict().items():
            assert torch.equal(value, undisturbed[name]), name
    return stopped, resumed.global_step


@pytest.mark.parametrize(
    ("kind", "rank", "save_last"),
    [("feedback", 0, True), ("gossip", 1, "link"), pytest.param("ring", 1, True, marks=pytest.mark.slow)],
)
def test_a_signal_to_any_rank_stops_all_with_a_checkpoint(
    ranks: Pool, tmp_path: Path, kind: str, rank: int, save_last: Any
) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"another run's")
    every_rank = ranks(2, _stop_and_go_on, kind, rank, str(tmp_path), save_last)
    stopped, end = every_rank[0]
    assert every_rank == [(stopped, end)] * 2
    assert 6 <= stopped <= 8, "at the next batch that rank 0 begins after it was told"
    assert (tmp_path / "last.ckpt").read_bytes() == b"another run's"


# What a rank does, without the others


@pytest.fixture
def calls() -> mock.Mock:
    """All that `Stopping` calls, in order: `calls.trainer`, `calls.store`."""
    calls = mock.Mock()
    calls.trainer.checkpoint_callbacks, calls.trainer.is_global_zero = [], True
    calls.trainer._signal_connector = calls.connector
    calls.store.has.return_value = False
    return calls


@pytest.fixture
def rank(calls: mock.Mock) -> Stopping:
    package = mock.Mock(SIGTERMException=SIGTERMException, ModelCheckpoint=ModelCheckpoint)
    session = mock.Mock(**{"link.detector.board.store": calls.store})
    calls.newcomers.return_value = 0
    return Stopping(calls.trainer, package, session, nullcontext, calls.newcomers)


@pytest.mark.parametrize("save_last", [True, False])
def test_all_have_saved_before_one_leaves(
    rank: Stopping, calls: mock.Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_last: bool
) -> None:
    """A launcher may end all if one rank leaves while another writes."""
    monkeypatch.setattr(stopping, "finish_writing", calls.finish_writing)
    monkeypatch.setattr(stopping, "_last_path", lambda *_: "last.ckpt")
    calls.trainer.checkpoint_callbacks = [ModelCheckpoint(tmp_path, save_last=save_last)]
    calls.trainer.fast_dev_run = False
    with pytest.raises(SIGTERMException):
        rank._stop()
    saves = ["trainer.save_checkpoint"] if save_last else []
    assert [name for name, _, _ in calls.mock_calls] == [*saves, "finish_writing", "trainer.strategy.barrier"]


def test_rank_0_tells_what_counts_most_and_the_others_write_it_once(rank: Stopping, calls: mock.Mock) -> None:
    assert rank._look() == _GO_ON
    calls.newcomers.return_value = 1
    rank._looked_at = 0.0
    assert rank._look() == _TAKE_IN
    calls.store.has.side_effect = lambda keys: keys == ["asked/requeue"]
    assert rank._look() == _GO_ON, "it looks once a second"
    rank._looked_at = 0.0
    assert rank._look() == _REQUEUE
    calls.trainer.is_global_zero = False
    rank._on_requeue(None, None)
    rank._on_sigterm(signal.SIGTERM, None)
    rank._on_requeue(None, None)
    assert (rank.asked, rank._look(), rank._look()) == (_STOP, _STOP, _STOP)
    calls.store.set.assert_called_once_with("asked/stop", "")


def test_ranks_that_meet_do_what_one_was_asked(rank: Stopping) -> None:
    assert not rank.agree(_GO_ON)
    rank.check()
    assert not rank.agree(_REQUEUE)
    assert rank.asked == _REQUEUE
    assert rank.agree(_STOP)
    with pytest.raises(SIGTERMException):
        rank.check()
