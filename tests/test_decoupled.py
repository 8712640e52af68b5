"""Trainers as learners of Decoupled DiLoCo: in one process, on two ranks, and beside a syncer that is killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import trustme
from jobs import program as program
from pool import Pool
from scripts import ROOT
from syncing import PARTS
from test_strategy import Net, fit, rows, same_everywhere
from torch import Tensor, nn

from benchmarks.ranks import Program, reserve_port
from ringstrategy import AllReduce, BlockInt, Decoupled, Gossip, Identity, LocalSGD, RingStrategy
from ringstrategy.app import syncer as command
from ringstrategy.requests import MailboxClient, MailboxServer, RefusedError, Server
from ringstrategy.server import background
from ringstrategy.server.background import Background, finder, text_of
from ringstrategy.server.folder import Folder, events
from ringstrategy.server.learner import Learner
from ringstrategy.server.syncer import Syncer

SECRET = "0123456789abcdef0123456789abcdef"


class Place(NamedTuple):
    address: str
    secret_file: str
    folder: Path
    syncer: Syncer

    def callback(self, **options: Any) -> Decoupled:
        how = {"fragments": 2, "quorum": 1, "grace": 0.0, "interval": 4, "overlap": 1, "codec": Identity()}
        return Decoupled(**{**how, "syncer": self.address, "secret_file": self.secret_file, **options})

    @property
    def versions(self) -> list[int]:
        return self.syncer.report()["versions"]


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    (tmp_path / "secret").write_text(SECRET + "\n")
    return str(tmp_path / "secret")


@contextlib.contextmanager
def serving(folder: Path, secret_file: str, tls: ssl.SSLContext | None = None) -> Iterator[Place]:
    with contextlib.closing(Folder(folder)) as files:
        syncer = Syncer(files, parts=PARTS)
        merges = threading.Thread(target=syncer.run, daemon=True)
        merges.start()
        with Server(("127.0.0.1", 0), SECRET.encode(), syncer.answer, gone=syncer.gone, tls=tls) as server:
            yield Place("{}:{}".format(*server.address), secret_file, folder, syncer)
        syncer.close()
        merges.join()


@pytest.fixture
def place(tmp_path: Path, secret_file: str) -> Iterator[Place]:
    with serving(tmp_path / "syncer", secret_file) as found:
        yield found


@pytest.fixture(params=["connections", "mailbox"])
def place_by(request: Any, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Each way to reach the syncer."""
    if request.param == "connections":
        yield place
        return
    url, given = (tmp_path / "a box").as_uri(), (SECRET.encode(), place.syncer.answer)
    monkeypatch.setattr(background, "MailboxClient", partial(MailboxClient, poll=0.01))
    with contextlib.closing(MailboxServer(url, *given, gone=place.syncer.gone, poll=0.01)):
        yield place._replace(address=f"mailbox:{url}")


class Until(L.Callback):
    """Let the other threads go on after each step until something is so: no test depends on a machine's speed."""

    def __init__(self, condition: Callable[[L.Trainer], bool]) -> None:
        self.condition, self.waits = condition, threading.Event()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        for _ in range(6000):
            if self.condition(trainer):
                return
            self.waits.wait(0.01)
        raise AssertionError("a minute has passed")


def exchanged(trainer: Any) -> bool:
    """Nothing is on its way to the syncer, and what was merged has come."""
    [callback] = [each for each in trainer.callbacks if isinstance(each, Decoupled)]
    if callback.learner is None:
        return True
    callback._background.wake()
    fragments = callback.learner._fragments
    return all(each.outgoing is None or each.arrived is not None for each in fragments)


def learn(callback: Any, model: Any = None, **options: Any) -> L.Trainer:
    """Twelve steps on one device, each of which ends when the syncer has answered."""
    model = Net() if model is None else model
    return fit("auto", model, callbacks=[callback, Until(exchanged)], devices=1, **options)


# One process


def test_learners_one_after_the_other_go_on_with_what_all_have_learned(place_by: Place) -> None:
    place = place_by
    first, second = place.callback(), place.callback()
    model = Net()
    learn(first, model)
    assert first.learner is not None
    assert first.learner.counts["taken"] > 3
    assert first.learner.counts["taken over"] > 4
    assert min(place.versions) >= 2
    theta = first.theta()
    assert theta.keys() == dict(model.named_parameters()).keys()
    other = Net(nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3)))
    seen: list[dict[str, Tensor]] = []

    class Looks(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append({name: each.detach().clone() for name, each in module.named_parameters()})

    fit("auto", other, callbacks=[second, Looks(), Until(exchanged)], devices=1)
    assert all(torch.equal(seen[0][name], each) for name, each in theta.items()), "it began with Theta"
    names = place.syncer.report()["learners"]
    assert len(names) == 2
    model.load_state_dict(second.theta(), strict=False)


def test_a_checkpoint_has_the_learner_in_it(place: Place, tmp_path: Path) -> None:
    callback = place.callback()
    trainer = learn(callback)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["callbacks"]["Decoupled"]
    assert saved["name"] == callback.learner.name
    again = place.callback()
    learn(again, ckpt_path=str(tmp_path / "run.ckpt"), max_epochs=trainer.current_epoch + 1)
    assert again.learner.name == saved["name"]
    assert again.learner.step > saved["step"] > 0
    assert again.learner._sequence > saved["sequence"]
    assert len(place.syncer.report()["learners"]) == 1
    wide = Net(nn.Sequential(nn.Linear(6, 18), nn.Tanh(), nn.Linear(18, 3)))
    wrong = place.callback()
    wrong.load_state_dict(saved)
    with pytest.raises(ValueError, match="of a learner with other fragments"):
        learn(wrong, wide)


def test_it_trains_as_without_where_the_syncer_is_away(secret_file: str) -> None:
    with contextlib.closing(reserve_port()) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        alone, beside = Net(), Net()
        fit("auto", alone, devices=1)
        callback = Decoupled(2, interval=4, syncer=address, secret_file=secret_file, codec=Identity())
        trainer = fit("auto", beside, callbacks=[callback], devices=1)
        assert trainer.global_step > 4
        for one, other in zip(alone.parameters(), beside.parameters(), strict=True):
            assert torch.equal(one, other)
        with pytest.raises(ConnectionError):
            callback.theta()
    with pytest.raises(RuntimeError, match="after a fit has begun"):
        Decoupled().theta()


class Moves(L.Callback):
    """After six steps the syncer ends, and comes back at another port: `told` is called with its place each time."""

    def __init__(self, folder: Path, secret_file: str, told: Callable[[Place], object]) -> None:
        self.serve, self.told = partial(serving, folder, secret_file), told
        self.places: list[Place] = []
        self.stack = contextlib.ExitStack()
        self.come()

    def come(self) -> None:
        self.places.append(self.stack.enter_context(self.serve()))
        self.told(self.places[-1])

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            self.stack.close()
            self.come()


@pytest.mark.parametrize("kind", ["a path", "file:", "a function"])
def test_it_finds_a_syncer_that_comes_back_at_another_port(kind: str, secret_file: str, tmp_path: Path) -> None:
    file, asked = tmp_path / "address", list[str]()

    def find() -> str:
        asked.append(file.read_text())
        if len(asked) == 2:
            raise RuntimeError("what it asks is away too")
        return asked[-1]

    moves = Moves(tmp_path / "syncer", secret_file, lambda place: file.write_text(place.address + "\n"))
    syncer: Any = {"a path": file, "file:": f"file:{file}", "a function": lambda: find().strip()}[kind]
    with moves.stack:
        first, callback = moves.places[0], moves.places[0].callback(syncer=syncer)
        fit("auto", Net(), callbacks=[callback, Until(exchanged), moves, Until(exchanged)], devices=1)
        second = moves.places[1]
        assert first.address != second.address
        assert sum(second.versions) > sum(first.versions) > 0
        assert [*second.syncer.report()["learners"]] == [callback.learner.name]
        assert callback.theta().keys() == dict(Net().named_parameters()).keys()
    assert kind != "a function" or len(set(asked)) == 2 < len(asked)


def test_a_syncer_that_nobody_knows_is_away(secret_file: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for syncer in (tmp_path / "missing", f"file:{tmp_path / 'empty'}", lambda: [][0]):
        callback = Decoupled(1, interval=4, syncer=syncer, secret_file=secret_file)
        fit("auto", Net(), callbacks=[callback], devices=1)
        assert callback.learner is not None
        assert not callback.learner.joined
        with pytest.raises(ConnectionError, match=r"tell where the syncer is"):
            callback.theta()
    with pytest.raises(ValueError, match="an address is host:port"):
        fit("auto", Net(), callbacks=[Decoupled(1, syncer=lambda: "here", secret_file=secret_file)], devices=1)
    with pytest.raises(ValueError, match="hosts= starts a syncer at an address: give syncer='host:port'"):
        learn(Decoupled(1, syncer="file:there", secret_file=secret_file, hosts=tmp_path))


def test_a_learner_ends_although_nobody_says_where_the_syncer_is(secret_file: str) -> None:
    asked, let = threading.Event(), threading.Event()

    def find() -> str:
        asked.set()
        let.wait()
        return "nowhere:1"

    learner = Learner(
        [{"p": torch.zeros(3)}], {}, codec=Identity(), broadcast=Identity(), interval=4, overlap=1, blend=1
    )
    background = Background(learner, finder(find), SECRET.encode())
    background.wake()
    asked.wait()
    background.close(0.0)
    assert background._thread.is_alive()
    let.set()
    background._thread.join()
    assert background._client is None


def test_with_a_certificate_all_is_encrypted(secret_file: str, tmp_path: Path) -> None:
    authority, context = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    context.load_cert_chain(str(tmp_path / "server.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with serving(tmp_path / "syncer", secret_file, context) as place:
        callback = place.callback(certificate=tmp_path / "ca.pem")
        learn(callback)
        assert callback.learner.counts["taken"] > 3
        assert callback.theta()
        plain = place.callback()
        fit("auto", Net(), callbacks=[plain], devices=1)
        assert not plain.learner.joined


def test_accumulated_gradients_are_one_step_of_all_their_samples(place: Place) -> None:
    callback = place.callback()
    trainer = learn(callback, accumulate_grad_batches=2)
    assert callback.learner.step == trainer.global_step > 2
    log = events(place.folder)
    batch = len(next(iter(rows()))[0])
    assert {push["weight"] % (2 * batch) for event in log for push in event["pushes"]} == {0.0}


def test_what_thaws_later_is_an_error(place: Place) -> None:
    class Thaws(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            module.layers[0].bias.requires_grad = True

    model = Net()
    model.layers[0].bias.requires_grad = False
    with pytest.raises(ValueError, match="other parameters require a gradient than when the fit began"):
        fit("auto", model, callbacks=[place.callback(), Thaws()], devices=1)
    for parameter in model.parameters():
        parameter.requires_grad = False
    with pytest.raises(ValueError, match="found no parameter that requires a gradient"):
        place.callback().on_train_start(L.Trainer(logger=False), model)


@pytest.mark.slow
def test_the_example_of_the_page_trains(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [example] = re.findall(r"```python no-run\n(.*?)```", (ROOT / "docs" / "servers.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example.replace("127.0.0.1:29600", place.address), names)
    assert names["learner"].learner.counts["taken"] >= 1
    assert place.versions > [0]


WRONG: list[tuple[Callable[[], Any], str]] = [
    *[
        (partial(Decoupled, **{name: bad}), name)
        for name in ("fragments", "interval", "overlap")
        for bad in (0, 1.5, True)
    ],
    (lambda: Decoupled(quorum=0), "quorum"),
    (lambda: Decoupled(interval=2), "fragments=4 and overlap=2 are at most interval=2"),
    (lambda: Decoupled(grace=-1.0), "grace is seconds >= 0, or 'auto'"),
    (lambda: Decoupled(grace="a while"), "grace is seconds >= 0, or 'auto'"),  # type: ignore[arg-type]
    (lambda: Decoupled(blend=0.0), "0 < blend <= 1"),
    (lambda: Decoupled(late="keep"), "makes training diverge"),  # type: ignore[arg-type]
    (lambda: Decoupled(codec="int8"), "codec is a codec such as"),  # type: ignore[arg-type]
    (lambda: Decoupled(outer=torch.optim.SGD(nn.Linear(1, 1).parameters())), "outer makes an optimizer"),  # type: ignore[arg-type]
    (lambda: Decoupled(merge=lambda pushes, weights: pushes[0]), "the syncer has no <lambda>"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_arguments_that_cannot_be_right_are_refused(wrong: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        wrong()


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (lambda: L.pytorch.strategies.FSDPStrategy(), "FSDPStrategy may cut them: take strategy='ring'"),
        (lambda: RingStrategy(Gossip()), "with Gossip.* they differ: take strategy='ring'"),
        (lambda: RingStrategy(LocalSGD(4)), "with LocalSGD.* they differ"),
        (lambda: RingStrategy(AllReduce(), on_peer_loss="shrink"), "leave out on_peer_loss and uneven"),
        (lambda: RingStrategy(AllReduce(uneven="join")), "leave out on_peer_loss and uneven"),
    ],
)
def test_strategies_whose_processes_differ_are_refused(strategy: Callable[[], Any], words: str, place: Place) -> None:
    class Trainer:
        is_global_zero = True

    trainer: Any = Trainer()
    trainer.strategy = strategy()
    with pytest.raises(ValueError, match=words):
        place.callback().setup(trainer, Net(), "fit")


def test_what_it_must_know_of_the_syncer_may_be_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, place: Place, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="set syncer= or RINGSTRATEGY_SYNCER, and start `ringstrategy-syncer"):
        learn(Decoupled())
    monkeypatch.setenv("RINGSTRATEGY_SYNCER", place.address)
    with pytest.raises(ValueError, match="set secret_file= or RINGSTRATEGY_SECRET_FILE"):
        learn(Decoupled())
    for content, words in ((None, "cannot be read .*openssl rand"), ("short", "at least 16 bytes")):
        (tmp_path / "other").unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "other").write_text(content)
        with pytest.raises(ValueError, match=words):
            learn(Decoupled(secret_file=tmp_path / "other"))
    monkeypatch.setenv("RINGSTRATEGY_SECRET_FILE", place.secret_file)
    monkeypatch.setenv("RINGSTRATEGY_SYNCER", "nowhere")
    with pytest.raises(ValueError, match="an address is host:port"):
        learn(Decoupled())
    monkeypatch.setenv("RINGSTRATEGY_SYNCER", "mailbox:memory://x")
    with pytest.raises(ValueError, match="hosts= starts a syncer at an address"):
        learn(Decoupled(hosts=tmp_path))
    with pytest.raises(ValueError, match="a mailbox has none"):
        learn(Decoupled(certificate=tmp_path / "ca.pem"))
    monkeypatch.setenv("RINGSTRATEGY_SYNCER", place.address)
    callback = place.callback(syncer=None, secret_file=None)
    learn(callback)
    assert callback.learner is not None
    assert callback.learner.joined


@pytest.mark.parametrize(
    ("text", "address"), [("a:1", ("a", 1)), ("[::1]:29600", ("::1", 29600)), ("[::]:0", ("::", 0)), (":7", ("", 7))]
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert command.address_of(text) == address


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (("10.0.0.1", 7), "10.0.0.1:7"),
        (("fe80::1", 7), "[fe80::1]:7"),
        *[((every, 7), f"{socket.gethostname()}:7") for every in ("", "0.0.0.0", "::")],
    ],
)
def test_an_address_is_told_as_others_reach_it(address: tuple[str, int], text: str) -> None:
    assert text_of(address) == text


@pytest.mark.parametrize("text", ["a", "a:b", "a:70000", "::1:5", ""])
def test_what_is_no_address_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"host:port, or \[host\]:port"):
        command.address_of(text)


def test_both_packages_have_it() -> None:
    import pytorch_lightning

    from ringstrategy import pytorch_lightning as ours

    assert issubclass(ours.Decoupled, pytorch_lightning.Callback)
    assert issubclass(Decoupled, L.Callback)


# Two processes are one learner


def _on_two(address: str, secret_file: str, strategy: str) -> tuple[int, dict[str, int] | None, int]:
    model = Net()
    how: Any = {"fragments": 2, "quorum": 1, "grace": 0.0, "interval": 4, "overlap": 2, "codec": BlockInt(8)}
    callback = Decoupled(**how, syncer=address, secret_file=secret_file)
    trainer = fit(strategy, model, callbacks=[callback, Until(exchanged)])
    assert trainer.world_size == 2
    for parameter in model.parameters():
        assert same_everywhere(parameter)
    return trainer.global_rank, None if callback.learner is None else callback.learner.counts, trainer.global_step


@pytest.mark.parametrize("strategy", ["ring", "ddp"])
def test_two_ranks_of_a_learner_hold_the_same_bits(ranks: Pool, place: Place, strategy: str) -> None:
    (_, counts, steps), (_, nothing, others) = ranks(2, _on_two, place.address, place.secret_file, strategy)
    assert nothing is None
    assert steps == others > 8
    assert counts is not None
    assert counts["taken"] > 2
    assert counts["taken over"] > 4
    [told] = place.syncer.report()["learners"].values()
    assert told["taken"] == counts["taken"]


def _refused(address: str, secret_file: str) -> str:
    with pytest.raises(Exception, match="trains something else") as caught:
        fit("ring", Net(), callbacks=[Decoupled(3, interval=4, syncer=address, secret_file=secret_file)])
    return str(caught.value)


def test_all_ranks_of_a_learner_that_is_refused_stop(ranks: Pool, place: Place) -> None:
    learn(place.callback())
    first, second = ranks(2, _refused, place.address, place.secret_file)
    assert "trains something else" in first
    assert second == f"the learner's first process: {RefusedError(first)!r}"


# Processes that die

LEARNER = """
import pathlib, sys, time
import lightning as L, torch
from test_strategy import Net
from ringstrategy import Decoupled, Identity

class Ends(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = pathlib.Path("end").exists()
        time.sleep(0.02)  # leaves the processors to those that start

torch.set_num_threads(1)
decoupled = Decoupled(2, 1, "auto", 4, 1, codec=Identity(), name=sys.argv[1], **eval(sys.argv[2]))
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randn(64, 3)), 4)
trainer = L.Trainer(max_epochs=-1, logger=False, callbacks=[decoupled, Ends()], enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=1)
trainer.fit(Net(), data)
"""
NAMES = ("a", "b")


def merged_by(folder: Path) -> dict[str, int]:
    """How many pushes of each learner were merged, in all its lives, which have names of their own in a mailbox."""
    log = events(folder) if (folder / "events.jsonl").exists() else []
    merged = [push["learner"].partition("~")[0] for event in log for push in event["pushes"]]
    return {name: merged.count(name) for name in NAMES}


def signal_all(one: Program, number: int) -> None:
    for pid in one.pids():
        os.kill(pid, number)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["connections", "mailbox"])
def test_a_syncer_that_is_killed_and_a_learner_that_is_come_back_and_no_merge_is_lost(
    program: Callable[..., Program], tmp_path: Path, secret_file: str, by: str
) -> None:
    folder, box = tmp_path / "syncer", str(tmp_path / "box")
    with contextlib.closing(reserve_port()) as port:
        address = f"127.0.0.1:{port.getsockname()[1]}"
        start = ("-m", "ringstrategy.app.syncer", "--bind", address, "--secret-file", secret_file, "--mailbox", box)
        serve = partial(program, sys.executable, *start, "--checkpoint", str(folder))
        found_at = address if by == "connections" else f"mailbox:{box}"
        environment = {"RINGSTRATEGY_SYNCER": found_at, "RINGSTRATEGY_SECRET_FILE": secret_file}

        def learner(name: str) -> Program:
            return program(sys.executable, "-c", LEARNER, name, "{}", **environment)

        def until_more(before: dict[str, int], *names: str) -> None:
            one.until(lambda: all(merged_by(folder)[name] > before[name] + 1 for name in names), f"merges of {names}")

        syncer, one, two = serve(), learner("a"), learner("b")
        until_more(dict.fromkeys(NAMES, 0), *NAMES)
        signal_all(syncer, signal.SIGKILL)
        syncer.process.wait()
        before, log = merged_by(folder), events(folder)
        syncer = serve()
        until_more(before, *NAMES)
        assert events(folder)[: len(log) - 1] == log[:-1], "only the last one may be in the log and not in its file"
        signal_all(two, signal.SIGKILL)
        two.process.wait()
        before = merged_by(folder)
        until_more(before, "a")
        two = learner("b")
        until_more(merged_by(folder), "b")
        (tmp_path / "end").touch()
        assert one.wait() == two.wait() == 0, one.errors + two.errors
        signal_all(syncer, signal.SIGTERM)
        assert syncer.wait() == 0, syncer.errors
    found = events(folder)
    for fragment in (0, 1):
        versions = [event["version"] for event in found if event["fragment"] == fragment]
        assert versions == list(range(1, len(versions) + 1))
    pushes = [(event["fragment"], push["learner"], push["sequence"]) for event in found for push in event["pushes"]]
    assert len(pushes) == len(set(pushes))


@pytest.mark.slow
def test_the_first_learner_hosts_a_syncer_that_outlives_it(
    program: Callable[..., Program], tmp_path: Path, secret_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hosted"
    with contextlib.closing(reserve_port()) as port:
        address = f"127.0.0.1:{port.getsockname()[1]}"
        environment = {"RINGSTRATEGY_SYNCER": address, "RINGSTRATEGY_SECRET_FILE": secret_file}
        hosts = program(sys.executable, "-c", LEARNER, "a", repr({"hosts": str(folder)}), **environment)
        hosts.until(lambda: (folder / "events.jsonl").exists() and merged_by(folder)["a"] > 1, "it has merged")
        os.kill(hosts.process.pid, signal.SIGKILL)
        other = program(sys.executable, "-c", LEARNER, "b", "{}", **environment)
        other.until(lambda: merged_by(folder)["b"] > 1, "the syncer is still there")
        with pytest.raises(ValueError, match="another syncer writes to"):
            Folder(folder)
        (tmp_path / "end").touch()
        assert other.wait() == 0


def test_a_syncer_ends_when_nobody_has_been_there_for_long_enough(
    tmp_path: Path, secret_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--bind", "127.0.0.1:0", "--secret-file", secret_file, "--checkpoint", str(tmp_path / "syncer")]
    file = tmp_path / "address"
    file.write_text("of the life before")
    with pytest.raises(SystemExit) as end:
        command.main([*arguments, "--idle", "0.1", "--status", "0", "--address-file", str(file)])
    assert end.value.code is None
    assert f"listens at {file.read_text()}" in capsys.readouterr().out
    assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*\n", file.read_text())
    assert not list(tmp_path.glob("address.*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quorum", "0"], "--quorum is at least 1, got 0"),
        (["--grace", "nan"], "--grace is seconds >= 0, got nan"),
        (["--bind", "here"], "ringstrategy-syncer: an address is host:port"),
        (["--secret-file", "/nowhere"], "ringstrategy-syncer: the secret file /nowhere cannot be read"),
        (["--mailbox", "nothing://x"], "ringstrategy-syncer: Protocol not known: nothing"),
        (["--certificate", "/nowhere"], "ringstrategy-syncer: .*No such file"),
    ],
)
def test_a_command_that_cannot_be_right_ends_with_the_cure(
    arguments: list[str], words: str, tmp_path: Path, secret_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--secret-file", secret_file, "--checkpoint", str(tmp_path / "syncer"), *arguments]
    with pytest.raises(SystemExit) as end:
        command.main(given)
    found = capsys.readouterr().err + str(end.value.code)
    assert re.search(words, found), found
