"""The lab: as asked for, and gone whatever ends it; and hosts that lose their network while their processes live."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import job as job  # a fixture
from test_strategy import Net, fit, rows
from torch import Tensor

from benchmarks import lab
from benchmarks.faulted import Plan, be_a_rank
from benchmarks.ranks import Job, is_alive, note, noted, until
from ringstrategy import PeerLostError, RingStrategy
from ringstrategy.failure import reach
from ringstrategy.names import STRATEGIES

LAB = [sys.executable, "-m", "benchmarks", "lab"]

needs_namespaces = pytest.mark.skipif(lab.missing() is not None, reason=f"no network namespaces: {lab.missing()}")

FAMILY = "sleep 1000 & {} sleep 1000 & sleep 1000"  # a rank, a child in its process group, and one put elsewhere


def marked(mark: str, command: str = "") -> list[int]:
    """Processes with this in their environment, wherever they moved to, that became this command."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            begin = Path(f"/proc/{pid}/cmdline").read_bytes().startswith(command.encode())
            if begin and mark.encode() in Path(f"/proc/{pid}/environ").read_bytes() and is_alive(pid):
                found.append(pid)
    return found


def wait_until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.02)


def interfaces() -> tuple[set[str], str]:
    """This machine's own, and how their packets queue."""
    tc = shutil.which("tc")
    queues = "" if tc is None else subprocess.run([tc, "qdisc"], capture_output=True, text=True, check=True).stdout
    return set(os.listdir("/sys/class/net")), queues


# What a link carries


@needs_namespaces
def test_without_a_command_it_prints_every_link_and_judges_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    previous = signal.getsignal(signal.SIGTERM)
    for part, fine in ((0.89, False), (0.91, True), (1.01, False)):
        monkeypatch.setattr(lab, "_stream", lambda *arguments, part=part, **options: part * 100e6 / 8)
        try:
            with contextlib.nullcontext() if fine else pytest.raises(SystemExit, match="outside of 90% to 100%: host"):
                lab.main(["--hosts", "2", "--rate", "1gbit", "--slow-link", "1=100mbit"])
        finally:
            signal.signal(signal.SIGTERM, previous)
        lines = capsys.readouterr().out.splitlines()
        assert [line.partition(":")[0] for line in lines] == ["host 0 -> host 1", "host 1 -> host 0"]
        said = f"{part * 12.5:.1f} MB/s, {part * 100:.1f} % of 100mbit, round trip"
        assert all(said in line for line in lines), said


# Who lives where


@needs_namespaces
def test_every_process_has_its_host_and_its_environment() -> None:
    outside = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text()
    name = socket.gethostname()
    ours = (
        "$(uname -n) $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK $GROUP_RANK $MASTER_ADDR:$MASTER_PORT"
    )
    script = f'echo "{ours} $(ip -o -4 addr show dev $GLOO_SOCKET_IFNAME)"'
    arguments = ["--hosts", "3", "--processes", "2", "--rate", "1gbit"]
    command = [*LAB, *arguments, "--", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text() == outside
    assert socket.gethostname() == name
    for rank in range(6):
        host, local = divmod(rank, 2)
        [line] = [line for line in done.stdout.splitlines() if f" {rank}/6 " in line]
        assert line.startswith(f"host{host} {rank}/6 {local}/2 {host} {host} 10.77.0.1:29500 ")
        assert f"10.77.0.{host + 1}/24" in line


def test_on_loopback_every_process_has_its_environment_and_this_machines_name() -> None:
    script = (
        f'test "$(uname -n)" = "{socket.gethostname()}" && test $RANK/$WORLD_SIZE/$NODE_RANK/$LOCAL_RANK = $EXPECTED'
    )
    with lab.Lab(2, "loopback", processes=3) as net:
        assert net.world_size == 6
        for rank in range(6):
            net.popen(rank, ["sh", "-c", script], {"EXPECTED": f"{rank}/6/{rank // 3}/{rank % 3}"})
        assert net.wait() == [0] * 6
        with pytest.raises(ValueError, match="no rank 6: the world size is 6"):
            net.popen(6, ["true"])


# What ends, and what is left


@pytest.mark.parametrize(
    ("number", "rate"),
    [
        pytest.param(signal.SIGTERM, "100mbit", marks=needs_namespaces),
        (signal.SIGINT, "loopback"),
        pytest.param(signal.SIGKILL, "100mbit", marks=needs_namespaces),
    ],
)
def test_a_signal_leaves_nothing_behind(number: signal.Signals, rate: str) -> None:
    before = interfaces()
    mark = f"signal-{number}-{rate}-{os.getpid()}"
    command = [*LAB, "--hosts", "2", "--processes", "2", "--rate", rate, "--", "sh", "-c"]
    command.append(FAMILY.format("" if rate == "loopback" else "setsid"))
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "LAB_TEST": mark})
    try:
        wait_until(lambda: len(marked(mark, "sleep")) == 12)
        process.send_signal(number)
        assert process.wait() != 0
        wait_until(lambda: not marked(mark))  # its keeper neither
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: interfaces() == before)


def test_the_others_end_after_one_that_failed() -> None:
    script = "test $RANK = 0 && sleep 1000; exit $((RANK * 3))"
    with lab.Lab(2, "loopback") as net:
        for rank in range(2):
            net.popen(rank, ["sh", "-c", script])
        assert net.wait(grace=0.2) == [-signal.SIGTERM, 3]


# A host that is cut off while its processes live

TIMEOUT = 4.0  # seconds, of the strategy


class Trains(Net):
    """Notes how far it is, and trains until something ends it."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        note(f"trains{self.global_rank}", step=self.global_step)
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def train(name: str) -> None:
    strategy = RingStrategy(STRATEGIES[name](), timeout=timedelta(seconds=TIMEOUT))
    try:
        fit(strategy, Trains(), data=rows(), max_epochs=-1, num_nodes=int(os.environ["WORLD_SIZE"]), devices=1)
    except PeerLostError as error:
        note(f"lost{os.environ['RANK']}", message=str(error), rank=error.rank)
        raise


def steps(folder: Path) -> list[int]:
    """That the ranks have come to."""
    return [[{"step": 0}, *noted(folder / f"trains{rank}")][-1]["step"] for rank in range(3)]


@needs_namespaces
@pytest.mark.parametrize(
    ("name", "victim"),
    [pytest.param("ring", 0, marks=pytest.mark.slow), pytest.param("gossip", 2, marks=pytest.mark.nightly)],
)
def test_a_host_that_is_cut_off_is_named_on_both_sides(tmp_path: Path, name: str, victim: int) -> None:
    """Three ranks on hosts of their own. A cut for a part of the timeout ends nothing."""
    command = [sys.executable, "-c", f"import test_lab; test_lab.train({name!r})"]
    here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    script = 'cd "$1"; shift; exec "$@" > output$RANK 2>&1'
    with lab.Lab(3, "none") as net:
        children = [net.popen(rank, ["sh", "-c", script, "sh", str(tmp_path), *command], here) for rank in range(3)]

        def wait(condition: Callable[[], Any], what: str) -> None:
            until(condition, what, lambda: [child.pid for child in children])

        wait(lambda: min(steps(tmp_path)) > 5, "all train")
        net.cut(victim)
        time.sleep(TIMEOUT / 4)
        far = max(steps(tmp_path))
        net.mend(victim)
        wait(lambda: min(steps(tmp_path)) > far + 5, "all train again")
        net.cut(victim)
        wait(lambda: all(child.poll() is not None for child in children), "all ended")
    assert [child.returncode for child in children] == [1, 1, 1]
    for rank in range(3):
        [record] = noted(tmp_path / f"lost{rank}")
        assert record["rank"] == victim, record
        sign = "it can reach no other host (10.77.0." if rank == victim else "its host cannot be reached at 10.77.0."
        assert sign in record["message"] or "says another rank" in record["message"], record


@needs_namespaces
def test_a_host_is_reached_whether_or_not_anybody_listens_there() -> None:
    assert reach.unreachable({"127.0.0.1", "127.0.0.2"}) == set()
    with lab.Lab(2, "none") as net:

        def look(seconds: float) -> set[str]:
            return reach.unreachable({net.address(0), net.address(1)}, seconds)

        assert net._on_host(0, partial(look, 60.0)) == set()
        net.cut(1)
        assert net._on_host(0, partial(look, 0.5)) == {net.address(1)}


def test_both_ends_of_a_connection_that_broke_are_named(job: Callable[..., Job], tmp_path: Path) -> None:
    """Rank 1 ends all connections of gloo that it has, and goes on; its connections to the store stay."""
    running = job(3, be_a_rank, Plan(str(tmp_path), fault="reset", place="forward", step=3, victims=(1,)))
    assert running.wait() == [1, 1, 1]
    named = [running.named(rank) for rank in range(3)]
    assert len({lost for lost, _ in named}) == 1, named
    for _, message in named:
        ends = re.search(r"lost rank (\d) .* its connection to rank (\d) \(host .*\) (broke|closed)", message)
        assert ends is not None, message
        assert "1" in ends.groups()
