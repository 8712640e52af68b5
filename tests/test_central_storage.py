"""Parameters are in memory once, each rank steps a slice of them: as `ddp` does, and nothing is left of it."""

from __future__ import annotations

import copy
import gc
import io
import mmap
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fakes import FakePeers, Network
from lightning.pytorch.callbacks import EMAWeightAveraging
from on_ranks import on_ranks
from pool import Pool
from test_parameter_server import (
    OPTIMIZERS,
    Make,
    Net,
    begun,
    in_one_process,
    is_one_process,
    loss_of,
    opened,
    spoiled,
    train,
    trained_by_two,
)
from test_session import MINUTE, process_group
from test_strategy import Net as Fitted
from test_strategy import fit
from torch import Tensor, nn

import ringstrategy as ring
from benchmarks.ranks import Program
from ringstrategy import AllReduce, CentralStorage
from ringstrategy.algorithms.server import segment, served
from ringstrategy.session import Session

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
    is_one_process(CentralStorage(**more), BY_ELEMENT[how], micro, more.get("clip_norm"))


# Memory


def mappings(kind: str) -> list[tuple[int, int, str]]:
    """Begin, end and inode of this process's mappings of our memory, "s": shared, "p": private."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:ringstrategy" in line]
    edges = [([int(edge, 16) for edge in line[0].split("-")], line[4]) for line in lines if line[1][3] == kind]
    return [(begin, end, inode) for (begin, end), inode in edges]


def lies_in(tensor: Tensor, kind: str) -> bool:
    return any(begin <= tensor.data_ptr() < end for begin, end, _ in mappings(kind))


@on_ranks(3)
def test_parameters_and_state_are_in_memory_once_and_gradients_once_a_rank() -> None:
    with process_group():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        with opened(CentralStorage(), OPTIMIZERS["adam"]) as (session, optimizer):
            module = session.module
            train(session, optimizer, range(3))
            assert all(lies_in(parameter, "s") for parameter in module.parameters())
            assert not any(lies_in(parameter, "p") for parameter in module.parameters())
            found: list[Any] = [None] * ranks
            dist.all_gather_object(found, sorted(inode for _, _, inode in mappings("s")))
            assert len(found[0]) == 2
            assert all(inodes == found[0] for inodes in found), "the same memory"
            numel = sum(parameter.numel() for parameter in module.parameters())
            nbytes = sum(end - begin for begin, end, _ in mappings("s"))
            assert 0 <= nbytes - (1 + ranks + 2) * 4 * numel < 4 * 4096  # values, gradients, Adam's moments

            [stepped] = session.algorithm._stepped  # type: ignore[attr-defined]
            moments = [value for state in stepped._fragment.optimizer.state.values() for value in state.values()]
            assert 0.8 < sum(value.numel() for value in moments) / (2 * numel / ranks) < 1.2, "of its own slice"
            assert all(lies_in(value, "s") for value in moments)
            assert not optimizer.state
            dist.barrier()
            if rank == 1:
                module.first.weight.data.fill_(7.0)
            dist.barrier()
            assert (module.first.weight == 7.0).all()
            values = [parameter.clone() for parameter in module.parameters()]
            dist.barrier()
        assert not any(lies_in(parameter, "s") for parameter in module.parameters())
        assert all(map(torch.equal, module.parameters(), values))
        del moments, stepped, session
        gc.collect()
        assert not mappings("s")
        with torch.no_grad():
            module.first.weight.fill_(float(rank))
            optimizer.state[module.first.weight]["exp_avg"].fill_(float(rank))  # memory of its own from now on
        dist.barrier()
        assert (module.first.weight == rank).all()
        assert (optimizer.state[module.first.weight]["exp_avg"] == rank).all()


@on_ranks(2)
def test_a_checkpoint_of_one_parameter_has_no_other() -> None:
    """`torch.save` writes whole storages."""
    with process_group(), opened(CentralStorage()) as (session, optimizer):
        train(session, optimizer, range(2))
        content = io.BytesIO()
        torch.save(session.module.state_dict()["rest.scale"], content)
        assert len(content.getvalue()) < 3000
        assert copy.deepcopy(session.module).first.weight.untyped_storage().nbytes() == 4 * 216


def killed(at: str) -> None:
    """Every rank ends as by `kill -9`, while it connects its memory or in training."""
    dist.init_process_group("gloo", timeout=MINUTE)
    end = partial(os.kill, os.getpid(), signal.SIGKILL)
    if at == "setting up":
        with mock.patch.object(mmap, "mmap", side_effect=lambda *_: end()), opened(CentralStorage()):
            pass
    with opened(CentralStorage()) as (session, optimizer):
        train(session, optimizer, range(2))
        assert mappings("s")
        dist.barrier()
        end()


@pytest.mark.parametrize("at", ["setting up", "in training"])
def test_nothing_is_left_of_killed_ranks(ranks: Pool, at: str) -> None:
    errors = [error or "" for _, error in ranks.outcomes(2, killed, at)]
    assert "the process died" in errors
    assert all(error == "the process died" or "PeerLostError" in error for error in errors)  # the other was quicker
    left = list(Path("/dev/shm").glob("*ringstrategy*"))
    for path in left:  # a fault leaves nothing for the next test
        path.unlink()
    assert not left


def orphaned() -> None:
    dist.init_process_group("gloo", timeout=MINUTE)
    with opened(CentralStorage(), OPTIMIZERS["adam"]) as (session, optimizer):
        module = session.module
        train(session, optimizer, range(2))
        values = [parameter.clone() for parameter in module.parameters()]
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ring.PeerLostError) as lost:
            train(session, optimizer, range(2, 4))
        assert lost.value.rank == 1
        whole = optimizer.state_dict()["state"]
        assert len(whole) == sum(parameter.requires_grad for parameter in module.parameters()), "of the lost rank too"
    assert not any(lies_in(parameter, "s") for parameter in module.parameters())
    assert all(map(torch.equal, module.parameters(), values))


def test_what_a_lost_rank_has_stepped_stays(ranks: Pool) -> None:
    outcomes = ranks.outcomes(3, orphaned)
    assert [outcomes[0][1], outcomes[2][1]] == [None, None]


# State


@on_ranks(2)
def test_checkpoints_are_those_of_all_reduce(tmp_path: Path) -> None:
    """Training that goes on with the other one, and that goes on with its own, ends with the same bits."""
    make = OPTIMIZERS["groups"]
    with process_group():
        whole, _ = in_one_process(make, 2, range(8))
        kinds: list[Callable[[], Any]] = [AllReduce, CentralStorage]
        for first in kinds:
            with opened(first(), make) as (session, optimizer):
                train(session, optimizer, range(4))
                saved = {"net": session.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**saved, "ours": session.state_dict()}, tmp_path / f"{dist.get_rank()}.pt")
            for second in kinds:
                saved = torch.load(tmp_path / f"{dist.get_rank()}.pt", weights_only=True)
                with opened(second(), make) as (session, optimizer):
                    train(session, optimizer, range(4, 6))  # other steps, which the checkpoint takes back
                    session.module.load_state_dict(saved["net"])
                    optimizer.load_state_dict(saved["optimizer"])
                    session.algorithm.load_state_dict(saved["ours"]["shared"])
                    train(session, optimizer, range(4, 8))
                    assert all(map(torch.equal, session.module.parameters(), whole.parameters())), (first, second)


@on_ranks(2)
def test_several_optimizers_in_16_and_64_bits_step_each_its_own() -> None:
    with process_group():
        ends = [trained_by_two(each, torch.float64, torch.bfloat16) for each in (CentralStorage(), AllReduce())]
        assert all(map(torch.equal, *ends))


# What is refused


def test_arguments_and_hosts_and_devices_are_refused_with_the_cure() -> None:
    for wrong, words in [({"clip_norm": -1}, "clip_norm is a number > 0"), ({"bucket_mb": True}, "bucket_mb is")]:
        with pytest.raises(ValueError, match=words):
            CentralStorage(**wrong)
    with pytest.raises(ValueError, match="use on_peer_loss='raise'"):
        ring.RingStrategy(CentralStorage(), on_peer_loss="shrink")
    for hosts, device, words in [
        (("a", "b"), "cpu", "the memory of one host, and the ranks are on 2: use a strategy for several hosts"),
        (("a", "a"), "meta", "parameter weight is on meta: pass accelerator='cpu'"),
    ]:
        # else nobody answers, if it is not refused
        with mock.patch.object(served, "compare_plans"), pytest.raises(ValueError, match=words):
            CentralStorage().setup(
                dict(nn.Linear(2, 2, device=device).named_parameters()), FakePeers(Network(2, hosts), 0)
            )


@on_ranks(2)
def test_what_it_cannot_do_is_refused_with_the_cure() -> None:
    sgd = torch.optim.SGD
    with process_group():
        net, mixed = Net(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        for module, optimizer, how, words in [
            (net, torch.optim.Adafactor(net.parameters()), {}, "may look at a whole parameter"),
            (net, torch.optim.LBFGS(net.parameters()), {}, "evaluates the loss"),
            (net, sgd(net.parameters()), {"scaled_loss": True}, "bf16-mixed"),
            (net, sgd(net.parameters()), {"clips_by_norm": True}, "CentralStorage(clip_norm=...)"),
            (mixed, sgd(mixed.parameters()), {}, "in one dtype of floating point, got torch.float32 and torch.float64"),
            (bag := nn.EmbeddingBag(3, 2, sparse=True), sgd(bag.parameters()), {}, "sparse=False"),
        ]:
            with pytest.raises(ValueError, match=re.escape(words)):
                begun(Session(module, CentralStorage(), timeout=MINUTE), [optimizer], how)
            dist.barrier()


@on_ranks(2)
def test_memory_that_cannot_be_shared_is_an_error_on_all_ranks() -> None:
    def elsewhere(card: str) -> int:
        return opens(card.rpartition(" ")[0] + " 1")  # another container has a process of that number

    opens = segment._open
    with process_group():
        for name, fault, words in [
            ("_available", lambda: 5e3, "GB of memory on the host at once, and 5e-06 GB are free: use a smaller model"),
            ("_open", elsewhere, "rank 1 cannot open the memory of rank 0 (there is another file at its place)"),
        ]:
            net = Net()
            with mock.patch.object(segment, name, fault), pytest.raises(ValueError, match=re.escape(words)):
                begun(Session(net, CentralStorage(), timeout=MINUTE), [torch.optim.SGD(net.parameters())], {})
            dist.barrier()
        gc.collect()
        with suppress(FileNotFoundError):  # the folder itself, which is read
            for each in sorted(Path("/proc/self/fd").iterdir(), key=lambda path: int(path.name)):
                assert "memfd" not in os.readlink(each)


@on_ranks(2)
def test_what_would_go_wrong_is_an_error() -> None:
    """Parameters that leave shared memory, options that need a place, graphs of old values, ranks that differ."""

    def converted(session: Session, optimizer: torch.optim.Optimizer) -> None:
        session.module.rest.double()
        session.module.rest.float()

    def assigned(session: Session, optimizer: torch.optim.Optimizer) -> None:
        session.module.rest.scale.data = torch.tensor(2.0)

    def momentum(session: Session, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["momentum"] = 0.9

    def clipped(session: Session, optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(session.module.parameters(), 0.1)

    def differs(session: Session, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())

    def kept(session: Session, optimizer: torch.optim.Optimizer) -> None:
        loss = session.module.first.weight.square().sum()
        optimizer.step()
        loss.backward()  # of old values

    with process_group():
        for spoil, words in [
            (converted, "parameter rest.frozen.bias has got memory of its own since training began"),
            (assigned, "parameter rest.scale has got memory of its own since training began"),
            (momentum, "SGD keeps 'momentum_buffer' since an option was changed"),
            (clipped, "CentralStorage(clip_norm=...)"),
            (differs, "lr=0.2"),
            (kept, "modified by an inplace operation"),
        ]:
            with opened(CentralStorage(), lambda module: torch.optim.SGD(module.parameters(), 0.1)) as (session, own):
                session.begin_batch("in batch 0", [own], first=True, later_epoch=False)
                session.backward(loss_of(session.module, 0, 0))
                with pytest.raises(RuntimeError, match=re.escape(words)):
                    spoiled(spoil, session, own)
                dist.barrier()


# Trainers


FIT = """
import sys, torch, lightning.pytorch as pl, ringstrategy
from lightning.pytorch.demos.boring_classes import BoringModel

class Net(BoringModel):
    def on_train_batch_end(self, *_):
        assert ("memfd:ringstrategy" in open("/proc/self/maps").read()) is sys.argv[1].startswith("central")
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)

if __name__ == "__main__":
    pl.seed_everything(1)
    net = Net()
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    quiet |= dict(max_epochs=1, limit_train_batches=8)
    trainer = pl.Trainer(strategy=sys.argv[1], accelerator="cpu", devices=2, **quiet)
    trainer.fit(net)
    if trainer.global_rank == 0:
        print("ends with", net.layer.weight.sum().item())
"""


@pytest.mark.slow
def test_every_way_to_start_processes_trains_the_same(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(FIT)
    ends = set()
    for name in ("ring", "central_storage", "central_storage_spawn", "central_storage_fork"):
        program = Program(tmp_path, [sys.executable, "fit.py", name])
        try:
            assert program.wait() == 0, program.errors
        finally:
            program.close()
        ends |= set(re.findall("ends with .*", program.printed))
    assert len(ends) == 1, ends


@on_ranks(2)
def test_a_callback_that_exchanges_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="EMAWeightAveraging exchanges the weights on each rank"):
        fit("central_storage", Fitted(), callbacks=[EMAWeightAveraging()])
