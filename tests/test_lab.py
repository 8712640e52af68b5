"""The lab: throttled and slowed as asked, and gone whatever ends it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripts import refusal

from benchmarks import lab
from benchmarks.ranks import is_alive

LAB = [sys.executable, "-m", "benchmarks", "lab"]

needs_namespaces = pytest.mark.skipif(lab.missing() is not None, reason=f"no network namespaces: {lab.missing()}")

FAMILY = "sleep 1000 & {} sleep 1000 & sleep 1000"  # a rank, a child in its process group, and one put elsewhere


def command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def marked(mark: str) -> list[str]:
    """Processes with this in their environment, wherever they moved to."""
    found = []
    for pid in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes() and is_alive(int(pid)):
                found.append(pid)
    return found


def asleep(mark: str) -> list[str]:
    """Those of them that became a `sleep`."""
    return [pid for pid in marked(mark) if command_of(pid).startswith("sleep ")]


def wait_until(condition) -> None:
    while not condition():
        time.sleep(0.02)


def interfaces() -> tuple[set[str], str]:
    """This machine's own, and how their packets queue."""
    tc = shutil.which("tc")
    queues = "" if tc is None else subprocess.run([tc, "qdisc"], capture_output=True, text=True, check=True).stdout
    return set(os.listdir("/sys/class/net")), queues


# What a link carries


@needs_namespaces
def test_without_a_command_it_prints_every_link_and_judges_it(monkeypatch, capsys):
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


@pytest.mark.nightly
@needs_namespaces
def test_links_carry_what_was_asked_for():
    for rate in ("100mbit", "1gbit"):
        with lab.Lab(2, rate) as net:
            carried = max(net.throughput(seconds=0.3) for _ in range(3)) * 8  # busy cores carry less, and never more
        assert 0.8 * net.bits_per_second < carried < 1.05 * net.bits_per_second
    with lab.Lab(3, "1gbit", slow_links={1: "50mbit"}) as net:
        links = list(net.links(seconds=0.4))
    assert [link.rate for link in links] == ["50mbit", "50mbit", "1gbit"]
    for link in links[:2]:
        assert 0.7 * 50e6 < link.bytes_per_second * 8 < 1.5 * 50e6
    assert links[2].bytes_per_second * 8 > 200e6
    with lab.Lab(2, "50mbit", processes=2) as net:
        assert net.throughput(1, 1, seconds=0.4) * 8 > 400e6, "past the throttle"
        assert net.throughput(1, 0, seconds=0.4) * 8 < 1.5 * 50e6


# Who lives where


@needs_namespaces
def test_every_process_has_its_host_and_its_environment():
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


def test_on_loopback_every_process_has_its_environment_and_this_machines_name():
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
def test_a_signal_leaves_nothing_behind(number, rate):
    before = interfaces()
    mark = f"signal-{number}-{rate}-{os.getpid()}"
    command = [*LAB, "--hosts", "2", "--processes", "2", "--rate", rate, "--", "sh", "-c"]
    command.append(FAMILY.format("" if rate == "loopback" else "setsid"))
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "LAB_TEST": mark})
    try:
        wait_until(lambda: len(asleep(mark)) == 12)
        process.send_signal(number)
        assert process.wait() != 0
        wait_until(lambda: not marked(mark))  # its keeper neither
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: interfaces() == before)


def test_the_exit_status_names_the_host_that_failed_and_the_others_end():
    script = "test $RANK = 0 && sleep 1000; exit $((RANK * 3))"
    with lab.Lab(2, "loopback") as net:
        for rank in range(2):
            net.popen(rank, ["sh", "-c", script])
        assert net.wait(grace=0.2) == [-signal.SIGTERM, 3]
    command = [*LAB, "--hosts", "2", "--rate", "loopback", "--", "sh", "-c", "exit $((RANK * 3))"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "rank 1 (host 1) ended with 3" in done.stderr
    assert "rank 0" not in done.stderr


# What cannot be


def test_a_lab_that_cannot_be_is_refused_with_the_cure(monkeypatch):
    for options, message in (
        *(({"rate": rate}, "write it like 100mbit or 1gbit") for rate in ("fast", "100", "0mbit", "1 gbit", "")),
        *(({"hosts": hosts}, "between 1 and 250") for hosts in (0, 251)),
        ({"processes": 0}, "processes must be at least 1"),
        ({"slow_links": {2: "1mbit"}}, "no host 2 to be slow: 2 hosts count from 0 to 1"),
        ({"slow_links": {1: "none"}}, "a slow link needs a rate like 100mbit"),
        ({"delay_ms": float("inf")}, "delay_ms must be 0 or more"),
        ({"slow_links": {1: "1mbit"}, "rate": "loopback"}, "not with the rate loopback"),
    ):
        with pytest.raises(ValueError, match=message):
            lab.Lab(**{"hosts": 2, **options})
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    for found, message in ((True, r"need root.*--rate loopback"), (False, r"ip, tc.*not found: install iproute2")):
        monkeypatch.setattr(lab.shutil, "which", lambda tool, found=found: f"/bin/{tool}" if found else None)
        with pytest.raises(lab.LabError, match=message):
            lab.Lab(2, "1gbit").__enter__()


@needs_namespaces
def test_where_namespaces_are_forbidden_it_says_what_is_missing():
    command = ["setpriv", "--bounding-set=-sys_admin", "--", *LAB, "--hosts", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "unshare: Operation not permitted: is this a container without CAP_SYS_ADMIN?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_slow_link_is_written_host_first(capsys):
    assert "write it like 3=100mbit, the host first" in refusal(["lab", "--slow-link", "100mbit"], capsys)
