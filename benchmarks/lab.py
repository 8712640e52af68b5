"""Hosts on a throttled network, on one Linux machine: network namespaces around a bridge, each link shaped by `tc tbf`.

    python benchmarks/lab.py --hosts 4 --rate 1gbit -- python train.py

runs the command once on every host, with the environment variables that torchrun and Lightning read.

The namespaces have no names: this process holds each by a file descriptor and every command dies with it, so when
it ends, whatever the reason, the kernel takes the interfaces, the bridge and the throttles away.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

LOOPBACK = "loopback"
UNTHROTTLED = "none"
_TOOLS = ("ip", "tc", "nsenter", "setpriv")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_CLONE_NEWNET = 0x40000000
_GSO_BYTES = 65536  # the largest packet a TCP socket hands to a queue; a smaller bucket makes tbf cut it up
_BURST_SECONDS = 0.002
_QUEUE_SECONDS = 0.5  # deep enough that nothing is dropped

# Namespaces would inherit the machine's default, and results with it: where that is bbr, which pauses for 200 ms to
# probe, all-reduces take up to 25 % longer at random, gloo's like ours. Reno every namespace may use, and times repeat.
_CONGESTION_CONTROL = "reno"


class LabError(RuntimeError):
    """This machine cannot host the lab; the text says what is missing."""


def bits_per_second(rate: str) -> float | None:
    """`100mbit` -> 1e8; None where nothing throttles."""
    if rate in (LOOPBACK, UNTHROTTLED):
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"rate {rate!r}: write it like 100mbit or 1gbit, or one of {UNTHROTTLED}, {LOOPBACK}")
    return float(match[1]) * _UNITS[match[2]]


def missing() -> str | None:
    """Why this process cannot make namespaces, or None if it can."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found: install iproute2 and util-linux, or use --rate {LOOPBACK}"
    if os.geteuid() != 0:
        return f"network namespaces need root: run as root, or use --rate {LOOPBACK}"
    return None


class Lab:
    """`hosts` machines, each with its own address, `rate` up and down; a context manager, good for one use.

    Args:
        hosts: how many, 1 to 250.
        rate: speed of each host's link in each direction (`100mbit`, `1gbit`), `none` for namespaces without a
            throttle, or `loopback` for plain processes on 127.0.0.1, which needs no root.
    """

    def __init__(self, hosts: int, rate: str = "1gbit") -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"hosts must be between 1 and 250, not {hosts}")
        self.hosts = hosts
        self.rate = rate
        self.bits_per_second = bits_per_second(rate)
        self._namespaces: list[int] = []  # file descriptors: one a host, then the bridge's
        self._children: list[subprocess.Popen[bytes]] = []
        self._port = 29500

    def __enter__(self) -> Lab:
        if self.rate == LOOPBACK:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._port = probe.getsockname()[1]
            return self
        reason = missing()
        if reason is not None:
            raise LabError(reason)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def interface(self) -> str:
        """Name of a host's network interface, the same on every host."""
        return "lo" if self.rate == LOOPBACK else "eth0"

    def address(self, rank: int) -> str:
        """IPv4 address of a host."""
        return "127.0.0.1" if self.rate == LOOPBACK else f"10.77.0.{rank + 1}"

    def environment(self, rank: int) -> dict[str, str]:
        """What torchrun, Lightning (`num_nodes=hosts, devices=1`) and gloo read on this host."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "NODE_RANK": str(rank),
            "GROUP_RANK": str(rank),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": self.interface,
        }

    def popen(self, rank: int, argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start `argv` on host `rank`, in a session of its own; it is killed if this process dies."""
        inside = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        if self._namespaces:
            inside += ["nsenter", f"--net={self._path(rank)}", "--"]
        merged = {**os.environ, **self.environment(rank), **(env or {})}
        child = subprocess.Popen([*inside, *argv], env=merged, start_new_session=True)
        self._children.append(child)
        return child

    def wait(self, grace: float = 30.0) -> list[int]:
        """Exit codes of all that was started. After a first failure the others have `grace` seconds left to live."""
        deadline = float("inf")
        while True:
            codes = [child.poll() for child in self._children]
            ended = [code for code in codes if code is not None]
            if len(ended) == len(codes):
                return ended
            if any(ended):
                deadline = min(deadline, time.monotonic() + grace)
            if time.monotonic() > deadline:
                self._stop_children()
            time.sleep(0.02)

    def throughput(self, seconds: float = 1.0) -> float:
        """Bytes a second that one raw TCP stream carries from host 0 to host 1, measured now; needs two hosts."""
        if self.hosts < 2:
            raise ValueError("a throughput needs two hosts")
        listener = self._on_host(1, socket.socket)
        sender = self._on_host(0, socket.socket)
        with listener, sender:
            listener.bind((self.address(1), 0))
            listener.listen(1)
            sender.connect(listener.getsockname())
            receiver, _ = listener.accept()
            with receiver:
                return _stream(sender, receiver, seconds)

    def close(self) -> None:
        """End what still runs and take the network away. May be called twice."""
        self._stop_children()
        while self._namespaces:
            os.close(self._namespaces.pop())

    def _build(self) -> None:
        for _ in range(self.hosts + 1):
            self._namespaces.append(_in_thread(_new_namespace))
        bridge = self.hosts
        self._run(bridge, "ip link add bridge type bridge forward_delay 0")
        self._run(bridge, "ip link set bridge up")
        for rank in range(self.hosts):
            port = f"port{rank}"
            # addrgenmode none: no IPv6 link-local address, which gloo could otherwise pick
            self._run(bridge, f"ip link add {port} type veth peer name eth0 netns {self._path(rank)}")
            self._run(bridge, f"ip link set {port} master bridge addrgenmode none up")
            self._run(rank, "ip link set lo up")
            self._on_host(rank, _set_congestion_control)
            self._run(rank, f"ip addr add {self.address(rank)}/24 dev eth0")
            self._run(rank, "ip link set eth0 addrgenmode none up")
            if self.bits_per_second is not None:
                self._run(rank, f"tc qdisc add dev eth0 root {self._throttle()}")  # up
                self._run(bridge, f"tc qdisc add dev {port} root {self._throttle()}")  # down

    def _throttle(self) -> str:
        assert self.bits_per_second is not None
        burst = max(2 * _GSO_BYTES, int(self.bits_per_second / 8 * _BURST_SECONDS))
        limit = burst + int(self.bits_per_second / 8 * _QUEUE_SECONDS)
        return f"tbf rate {int(self.bits_per_second)}bit burst {burst} limit {limit}"

    def _path(self, index: int) -> str:
        return f"/proc/{os.getpid()}/fd/{self._namespaces[index]}"

    def _run(self, index: int, command: str) -> None:
        argv = ["nsenter", f"--net={self._path(index)}", "--", *command.split()]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LabError(f"`{command}` failed: {done.stderr.strip()}")

    def _on_host(self, rank: int, make: Callable[[], T]) -> T:
        """Call `make` inside the host's namespace; a socket made there stays there."""
        if not self._namespaces:
            return make()

        def inside() -> T:
            _libc("setns", self._namespaces[rank], _CLONE_NEWNET)
            return make()

        return _in_thread(inside)

    def _stop_children(self) -> None:
        running = [child for child in self._children if child.poll() is None]
        for child in running:
            _signal_session(child, signal.SIGTERM)
        deadline = time.monotonic() + 5.0
        for child in running:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
        for child in self._children:
            _signal_session(child, signal.SIGKILL)  # also what a finished command left behind in its session
            child.wait()


def _signal_session(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return  # everybody in it has ended


def _libc(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise LabError(f"{name}: {os.strerror(code)}: is this a container without CAP_SYS_ADMIN?")


def _new_namespace() -> int:
    """Move the calling thread into a fresh network namespace; returns a file descriptor that keeps it alive."""
    _libc("unshare", _CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _set_congestion_control() -> None:
    """For the calling thread's network namespace."""
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(_CONGESTION_CONTROL)


def _in_thread(work: Callable[[], T]) -> T:
    """Call `work` on a thread that then ends, so that the namespace it moved to does not stick to the caller."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _stream(sender: socket.socket, receiver: socket.socket, seconds: float) -> float:
    """Send as fast as it goes; bytes a second at the receiver, after a start-up that is not counted."""
    done = threading.Event()

    def send() -> None:
        block = bytes(1 << 18)
        while not done.is_set():
            sender.sendall(block)
        sender.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    block = bytearray(1 << 18)
    start = time.perf_counter()
    while time.perf_counter() < start + 0.3:  # slow start and the bucket's first burst
        receiver.recv_into(block)
    counted = 0
    begin = time.perf_counter()
    while time.perf_counter() < begin + seconds:
        counted += receiver.recv_into(block)
    measured = counted / (time.perf_counter() - begin)
    done.set()
    while receiver.recv_into(block):
        pass
    thread.join()
    return measured


def exit_on_sigterm() -> None:
    """Make SIGTERM unwind the stack like Ctrl-C does, so that `with Lab(...)` closes."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def main() -> None:
    """The command line: one command on every host."""
    parser = argparse.ArgumentParser(description="Run a command on every host of a throttled network.")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", help="100mbit, 1gbit, ..., none (no throttle), loopback (no root)")
    parser.add_argument("command", nargs="*", help="after --; without one, the throttle is measured and printed")
    arguments = parser.parse_args()
    exit_on_sigterm()
    try:
        with Lab(arguments.hosts, arguments.rate) as lab:
            if not arguments.command:
                print(f"one TCP stream: {lab.throughput() / 1e6:.1f} MB/s of {lab.rate}")
                return
            for rank in range(lab.hosts):
                lab.popen(rank, arguments.command)
            codes = lab.wait()
    except (LabError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    failed = [f"host {rank} ended with {code}" for rank, code in enumerate(codes) if code != 0]
    if failed:
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
