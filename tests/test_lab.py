"""The lab: throttled as asked, and gone whatever ends it."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAB = Path(__file__).parents[1] / "benchmarks" / "lab.py"
_spec = importlib.util.spec_from_file_location("lab", LAB)
assert _spec is not None
assert _spec.loader is not None
lab = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lab)

pytestmark = pytest.mark.timeout(60)
needs_namespaces = pytest.mark.skipif(lab.missing() is not None, reason=f"no network namespaces: {lab.missing()}")


def namespace_of(pid: int | str) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def inside(namespaces: set[int]) -> list[str]:
    """Processes that live in one of the namespaces."""
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and namespace_of(pid) in namespaces]


def wait_until(condition, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


@needs_namespaces
@pytest.mark.parametrize("rate", ["100mbit", "1gbit"])
def test_one_stream_carries_the_rate_that_was_asked_for(rate):
    with lab.Lab(2, rate) as net:
        carried = net.throughput(seconds=0.5) * 8
    assert 0.8 * net.bits_per_second < carried < 1.05 * net.bits_per_second


@needs_namespaces
def test_without_a_throttle_a_stream_is_much_faster():
    with lab.Lab(2, "none") as net:
        assert net.throughput(seconds=0.3) * 8 > 2e9


@needs_namespaces
def test_two_labs_do_not_meet():
    with lab.Lab(2, "100mbit") as one, lab.Lab(2, "100mbit") as other:
        pids = [net.popen(rank, ["sleep", "1000"]).pid for net in (one, other) for rank in (0, 1)]
        wait_until(lambda: len({namespace_of(pid) for pid in pids} - {namespace_of("self")}) == 4)


@needs_namespaces
def test_every_host_has_its_address_and_its_environment():
    outside = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text()
    script = 'echo "$RANK/$WORLD_SIZE $NODE_RANK $LOCAL_RANK $MASTER_ADDR"; ip -o -4 addr show dev $GLOO_SOCKET_IFNAME'
    command = [sys.executable, LAB, "--hosts", "3", "--rate", "1gbit", "--", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text() == outside
    for rank in range(3):
        assert f"{rank}/3 {rank} 0 10.77.0.1" in done.stdout
        assert f"10.77.0.{rank + 1}/24" in done.stdout


@needs_namespaces
def test_an_exception_leaves_nothing_behind():
    before = interfaces()
    namespaces: set[int] = set()

    def in_a_lab() -> None:
        with lab.Lab(2, "100mbit") as net:
            children = [net.popen(rank, ["sh", "-c", "sleep 1000 & sleep 1000"]) for rank in (0, 1)]
            wait_until(lambda: all(namespace_of(child.pid) != namespace_of("self") for child in children))
            namespaces.update(namespace_of(child.pid) for child in children)
            wait_until(lambda: len(inside(namespaces)) >= 4)  # each host's shell and what it left in the background
            raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        in_a_lab()
    assert len(namespaces) == 2
    wait_until(lambda: not inside(namespaces))
    assert interfaces() == before


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_nothing_behind(number):
    before = interfaces()
    command = [sys.executable, LAB, "--hosts", "2", "--rate", "100mbit", "--", "sleep", "1000"]
    driver = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def children() -> list[str]:
        return Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()

    def started() -> bool:
        try:
            return sum(Path(f"/proc/{pid}/comm").read_text() == "sleep\n" for pid in children()) == 2
        except (FileNotFoundError, ProcessLookupError):  # a helper process of the lab's own came and went
            return False

    wait_until(started)
    namespaces = {namespace_of(pid) for pid in children()}
    assert len(namespaces) == 2
    assert namespace_of("self") not in namespaces
    driver.send_signal(number)
    assert driver.wait(timeout=15) != 0
    wait_until(lambda: not inside(namespaces))
    assert interfaces() == before


def test_the_exit_status_names_the_host_that_failed():
    command = [sys.executable, LAB, "--hosts", "2", "--rate", "loopback", "--", "sh", "-c", "exit $((RANK * 3))"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "host 1 ended with 3" in done.stderr
    assert "host 0" not in done.stderr


def test_after_a_failure_the_others_have_a_grace_and_then_an_end():
    with lab.Lab(2, "loopback") as net:
        net.popen(0, ["sleep", "1000"])
        net.popen(1, ["false"])
        assert net.wait(grace=0.2) == [-signal.SIGTERM, 1]


def test_without_root_or_tools_it_refuses_with_the_cure(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(lab.shutil, "which", lambda tool: None)
        with pytest.raises(lab.LabError, match=r"ip, tc.*not found: install iproute2.*--rate loopback"):
            lab.Lab(2, "1gbit").__enter__()
    monkeypatch.setattr(lab.shutil, "which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    with pytest.raises(lab.LabError, match=r"need root.*--rate loopback"):
        lab.Lab(2, "1gbit").__enter__()


@pytest.mark.parametrize("rate", ["fast", "100", "0mbit", "1 gbit", ""])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match="write it like 100mbit or 1gbit"):
        lab.Lab(2, rate)


@pytest.mark.parametrize("hosts", [0, 251])
def test_a_number_of_hosts_that_does_not_fit_is_refused(hosts):
    with pytest.raises(ValueError, match="between 1 and 250"):
        lab.Lab(hosts, "loopback")
