"""A signal to one rank: all ranks stop at the same batch, and what they save is all that a later run needs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from pool import Pool
from test_strategy import Net, fit, run_script
from torch import nn

from ringstrategy import AllReduce, BlockInt, Gossip, RingStrategy
from ringstrategy.integrations.lightning import stopping

pytestmark = pytest.mark.timeout(120)
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
    stopping._LOOK_SECONDS = 0.0  # or rank 0 would not look before the end
    saver = ModelCheckpoint(folder, save_last=save_last, every_n_epochs=10)
    with pytest.raises(SIGTERMException):
        fit(strategies()[kind], deep(), callbacks=[saver, Signals(rank, 6)], enable_checkpointing=True)
    files = [path.name for path in Path(folder).iterdir() if path.suffix == ".ckpt"]
    assert files == ["last.ckpt"]
    stopped = torch.load(Path(folder) / "last.ckpt", weights_only=True)["global_step"]
    resumed = fit(strategies()[kind], deep(), ckpt_path=str(Path(folder) / "last.ckpt"))
    if stopped == STEPS // 2:  # within an epoch Lightning itself begins with the epoch's first batch
        undisturbed = fit(strategies()[kind], deep()).lightning_module.state_dict()
        for name, value in resumed.lightning_module.state_dict().items():
            assert torch.equal(value, undisturbed[name]), name
    return stopped, resumed.global_step


@pytest.mark.parametrize("save_last", [True, "link"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["ring", "feedback", "gossip"])
def test_a_signal_to_any_rank_stops_all_with_a_checkpoint(
    ranks: Pool, tmp_path: Path, kind: str, rank: int, save_last: Any
) -> None:
    every_rank = ranks(2, _stop_and_go_on, kind, rank, str(tmp_path), save_last)
    stopped, end = every_rank[0]
    assert every_rank == [(stopped, end)] * 2
    assert 6 <= stopped <= 8, "at the next batch that rank 0 begins after it was told"


def _beside_another_run(folder: str) -> list[str]:
    saver = ModelCheckpoint(folder, save_last=True, every_n_epochs=10)
    with pytest.raises(SIGTERMException):
        fit("ring", deep(), callbacks=[saver, Signals(0, 3)], enable_checkpointing=True)
    return sorted(path.name for path in Path(folder).iterdir())


def test_the_last_checkpoint_of_another_run_is_kept(ranks: Pool, tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"another run's")
    assert ranks(2, _beside_another_run, str(tmp_path))[0] == ["last-v1.ckpt", "last.ckpt"]
    assert (tmp_path / "last.ckpt").read_bytes() == b"another run's"


def _in_the_last_batch() -> bool:
    trainer = fit("ring", deep(), callbacks=[Signals(0, STEPS)])
    return trainer.received_sigterm


class _Handler(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.of_this_fit = signal.getsignal(signal.SIGTERM)


def _before_lightning_takes_the_handler_away() -> bool:
    handler = _Handler()
    trainer = fit("ring", deep(), callbacks=[handler])
    assert callable(handler.of_this_fit)
    if trainer.global_rank == 0:
        handler.of_this_fit(signal.SIGTERM, None)
    return trainer.received_sigterm


@pytest.mark.parametrize("when", [_in_the_last_batch, _before_lightning_takes_the_handler_away])
def test_a_signal_that_comes_too_late_for_the_fit_is_passed_on(ranks: Pool, when: Callable[[], bool]) -> None:
    assert ranks(2, when) == [True, False]


def _without_a_place_to_save() -> list[str]:
    with pytest.raises(SIGTERMException):
        fit("ring", deep(), callbacks=[Signals(0, 3)])
    return [line for line in os.listdir() if line.endswith(".ckpt")]


def test_without_save_last_nothing_is_saved(ranks: Pool) -> None:
    assert ranks(2, _without_a_place_to_save) == [[], []]


def _requeue() -> tuple[int, int]:
    """As under Slurm, whose handler is called by all ranks at one batch; training goes on until Slurm ends it."""
    called: list[int] = []
    stopping._LOOK_SECONDS = 0.0

    class Slurm(Callback):
        def setup(self, trainer: Any, *_: Any, stage: str) -> None:
            trainer._signal_connector._slurm_sigusr_handler_fn = lambda *_: called.append(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if (trainer.global_rank, trainer.global_step) == (1, 4):
                trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)

    trainer = fit("ring", deep(), callbacks=[Slurm()])
    [step] = called
    return step, trainer.global_step


def test_slurm_requeues_all_ranks_at_one_batch(ranks: Pool) -> None:
    every_rank = ranks(2, _requeue)
    step, end = every_rank[0]
    assert every_rank == [(step, end)] * 2
    assert 4 <= step <= 6
    assert end == STEPS


def _handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    trainer = fit("ring", deep())
    assert signal.getsignal(signal.SIGTERM) == before
    assert "_sigterm_notifier_fn" not in vars(trainer._signal_connector)
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)


def test_lightning_gets_its_handlers_back(ranks: Pool) -> None:
    ranks(2, _handlers_are_given_back)


DIES = """
import os
from lightning.pytorch.callbacks import Callback
from test_strategy import Net, fit

class Dies(Callback):
    def on_train_batch_start(self, trainer, module, batch, place):
        if trainer.global_rank == 1 and trainer.global_step == 3:
            os._exit(7)

fit("ring", Net(), devices=2, callbacks=[Dies()])
"""


@pytest.mark.slow
def test_torchrun_ends_survivors_and_they_name_who_died(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = run_script(tmp_path, DIES, *torchrun)
    assert done.returncode != 0
    assert "rank 0: PeerLostError: lost rank 1" in done.stderr, done.stderr


SPAWNS = """
if __name__ == "__main__":
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from test_stopping import Signals
    from test_strategy import Net, fit

    try:
        fit("ring_spawn", Net(), devices=2, max_epochs=1000, callbacks=[Signals(1, 3)])
    except SIGTERMException:
        print("stopped")
"""


@pytest.mark.slow
def test_a_signal_to_a_spawned_rank_stops_all(tmp_path: Path) -> None:
    """Lightning itself would wait for a result for ever."""
    done = run_script(tmp_path, SPAWNS)
    assert "stopped" in done.stdout, done.stderr
