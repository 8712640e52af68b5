"""A signal to one rank: all ranks stop at the same batch, and what they save is all that a later run needs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from on_ranks import on_ranks
from test_strategy import Net, fit, same_everywhere
from torch import nn

from ringstrategy import AllReduce, BlockInt, Gossip, RingStrategy
from ringstrategy.algorithms.base import Algorithm
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


def deep() -> Net:
    torch.manual_seed(int(os.environ["RANK"]))
    return Net(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)))


@pytest.mark.parametrize(
    ("algorithm", "rank", "save_last"),
    [
        (AllReduce(BlockInt(4), error_feedback=True), 0, True),
        (Gossip(), 1, "link"),
        pytest.param(AllReduce(), 1, True, marks=pytest.mark.slow),
    ],
    ids=["feedback", "gossip", "ring"],
)
@on_ranks(2)
@mock.patch.object(stopping, "_LOOK_SECONDS", 0.0)  # or rank 0 would not look before the end
def test_a_signal_to_any_rank_stops_all_with_a_checkpoint(
    algorithm: Algorithm, rank: int, save_last: Any, tmp_path: Path
) -> None:
    """Beside the last checkpoint of another run."""
    (tmp_path / "last.ckpt").write_bytes(b"another run's")
    before = signal.getsignal(signal.SIGTERM)
    saver = ModelCheckpoint(tmp_path, save_last=save_last, every_n_epochs=10)
    with pytest.raises(SIGTERMException):
        fit(RingStrategy(algorithm), deep(), callbacks=[saver, Signals(rank, 6)], enable_checkpointing=True)
    assert signal.getsignal(signal.SIGTERM) == before
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["last-v1.ckpt", "last.ckpt"]
    assert (tmp_path / "last.ckpt").read_bytes() == b"another run's"
    saved = str(tmp_path / "last-v1.ckpt")
    stopped = torch.load(saved, weights_only=True)["global_step"]
    assert 6 <= stopped <= 8, "at the next batch that rank 0 begins after it was told"
    resumed = fit(RingStrategy(algorithm), deep(), ckpt_path=saved)
    assert same_everywhere(torch.tensor(resumed.global_step))
    if stopped == STEPS // 2:  # within an epoch Lightning itself begins with the epoch's first batch
        undisturbed = fit(RingStrategy(algorithm), deep()).lightning_module.state_dict()
        for name, value in resumed.lightning_module.state_dict().items():
            assert torch.equal(value, undisturbed[name]), name


class Slurm(Callback):
    """Its handler is called by all ranks at one batch, after rank 1 alone got the signal; training goes on."""

    def __init__(self) -> None:
        self.called: list[int] = []

    def setup(self, trainer: Any, *_: Any, stage: str) -> None:
        trainer._signal_connector._slurm_sigusr_handler_fn = lambda *_: self.called.append(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (1, 4):
            trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)


@on_ranks(2)
@mock.patch.object(stopping, "_LOOK_SECONDS", 0.0)
def test_slurm_requeues_all_ranks_at_one_batch() -> None:
    trainer = fit("ring", deep(), callbacks=[slurm := Slurm()])
    assert trainer.global_step == STEPS
    [step] = slurm.called
    assert 4 <= step <= 6
    assert same_everywhere(torch.tensor(step))


# What a rank does, without the others


@pytest.fixture
def calls() -> mock.Mock:
    """All that `Stopping` calls, in order: `calls.trainer`, `calls.store`, and the members."""
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
    return Stopping(calls.trainer, package, session, calls)


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


class Handler(Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.of_this_fit = signal.getsignal(signal.SIGTERM)


@on_ranks(2)
def test_a_signal_that_comes_too_late_for_the_fit_is_passed_on() -> None:
    in_the_last_batch = fit("ring", deep(), callbacks=[Signals(0, STEPS)])
    before_lightning_takes_the_handler_away = fit("ring", deep(), callbacks=[handler := Handler()])
    got_it = before_lightning_takes_the_handler_away.global_rank == 0
    if got_it:
        handler.of_this_fit(signal.SIGTERM, None)
    for trainer in (in_the_last_batch, before_lightning_takes_the_handler_away):
        assert trainer.received_sigterm == got_it
