"""Hosts on a throttled network, on one Linux machine: network namespaces around a bridge, each link shaped by `tc tbf`.

    python -m benchmarks lab --hosts 4 --processes 2 --rate 1gbit --slow-link 3=100mbit -- python train.py

runs the command twice on every host, with the environment variables that torchrun and Lightning read. A host has a name
of its own (host0, ...), which resolves to nothing: use addresses.

The namespaces have no names: this process and its keeper (keeper.py) hold them by file descriptors. When this
process ends, whatever the reason, the keeper kills what still runs on the hosts and ends too, and the kernel takes the
interfaces, the bridge and the throttles away.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import math
import os
import re
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar

T = TypeVar("T")

LOOPBACK = "loopback"
UNTHROTTLED = "none"
_TOOLS = ("ip", "tc", "nsenter", "setpriv")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_CLONE_NEWNET = 0x40000000
_CLONE_NEWUTS = 0x04000000
_SIOCGIFFLAGS = 0x8913
_IFF_RUNNING = 0x40
_KEEPER = Path(__file__).resolve().with_name("keeper.py")
_GSO_BYTES = 65536  # the largest packet a TCP socket hands to a queue; a smaller bucket makes tbf cut it up
_BURST_SECONDS = 0.002
_CARRIER_SECONDS = 60.0  # on a busy machine the kernel takes one
_QUEUE_SECONDS = 0.5  # deep enough that nothing is dropped
_SETTLE_SECONDS, _STREAM_SECONDS = 0.3, 1.0  # of a measured stream, not counted and counted
_ROUND_TRIPS = 10
_PARTS = (0.9, 1.0)  # of the rate: what one stream's payload must reach and cannot pass, headers take 4.4 %

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


class Link(NamedTuple):
    """What one raw TCP stream was measured to carry from one host to another."""

    source: int
    target: int
    rate: str  # of the slower of the two hosts' links
    bytes_per_second: float
    round_trip: float  # seconds, of one byte there and back on idle links

    @property
    def part(self) -> float | None:
        """Of the rate; None where nothing throttles."""
        bits = bits_per_second(self.rate)
        return None if bits is None else self.bytes_per_second * 8 / bits

    @property
    def as_asked(self) -> bool:
        """Whether the throttle does what it should: it lets 90 to 100 % of the rate through."""
        return self.part is None or _PARTS[0] <= self.part <= _PARTS[1]

    def __str__(self) -> str:
        share = "not throttled" if self.part is None else f"{self.part:.1%} of {self.rate}".replace("%", " %")
        speed = f"{self.bytes_per_second / 1e6:.1f} MB/s"
        return f"host {self.source} -> host {self.target}: {speed}, {share}, round trip {self.round_trip * 1e3:.2f} ms"


class Lab:
    """`hosts` machines, each with its own address, `rate` up and down; a context manager, good for one use.

    Ranks are host-major: rank = host * processes + local rank. Processes of one host share its address and speak to
    each other past the throttle, over the host's own loopback.

    Args:
        hosts: how many, 1 to 250.
        rate: speed of each host's link in each direction (`100mbit`, `1gbit`), `none` for namespaces without a
            throttle, or `loopback` for plain processes on 127.0.0.1, which needs no root.
        processes: how many run on each host.
        slow_links: rate of the link of single hosts, by host, up and down.
    """

    def __init__(
        self,
        hosts: int,
        rate: str = "1gbit",
        *,
        processes: int = 1,
        slow_links: Mapping[int, str] | None = None,
    ) -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"hosts must be between 1 and 250, not {hosts}")
        if processes < 1:
            raise ValueError(f"processes must be at least 1, not {processes}")
        self.hosts = hosts
        self.rate = rate
        self.processes = processes
        self.slow_links = dict(slow_links or {})
        self.bits_per_second = bits_per_second(rate)
        for host in self.slow_links:
            if not 0 <= host < hosts:
                raise ValueError(f"there is no host {host} to be slow: {hosts} hosts count from 0 to {hosts - 1}")
        if rate == LOOPBACK and self.slow_links:
            raise ValueError(f"slow_links need a network of their own: not with the rate {LOOPBACK}")
        for slow in self.slow_links.values():
            if bits_per_second(slow) is None:
                raise ValueError(f"a slow link needs a rate like 100mbit, not {slow!r}")
        self._networks: list[int] = []  # file descriptors: one a host, then the bridge's
        self._names: list[int] = []  # the same for the namespaces of the hostnames, one a host
        self._children: list[subprocess.Popen[bytes]] = []
        self._keeper: subprocess.Popen[bytes] | None = None
        self._port = 29500

    def __enter__(self) -> Lab:
        if self.rate == LOOPBACK:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._port = probe.getsockname()[1]
        elif (reason := missing()) is not None:
            raise LabError(reason)
        try:
            if self.rate != LOOPBACK:
                self._build()
            self._start_keeper()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def world_size(self) -> int:
        """Processes on all hosts together."""
        return self.hosts * self.processes

    @property
    def interface(self) -> str:
        """Name of a host's network interface, the same on every host."""
        return "lo" if self.rate == LOOPBACK else "eth0"

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return "127.0.0.1" if self.rate == LOOPBACK else f"10.77.0.{host + 1}"

    def link_rate(self, host: int) -> str:
        """Rate of a host's own link."""
        return self.slow_links.get(host, self.rate)

    def environment(self, rank: int) -> dict[str, str]:
        """What torchrun, Lightning (`num_nodes=hosts, devices=processes`) and gloo read in this process."""
        host, local = divmod(rank, self.processes)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "NODE_RANK": str(host),
            "GROUP_RANK": str(host),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": self.interface,
        }

    def popen(self, rank: int, argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start `argv` as `rank` on that rank's host, in a session of its own; it is killed if this process dies."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"there is no rank {rank}: the world size is {self.world_size}")
        host = rank // self.processes
        inside = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        if self._networks:
            network, name = (_path(namespaces[host]) for namespaces in (self._networks, self._names))
            inside += ["nsenter", f"--net={network}", f"--uts={name}", "--"]
        merged = {**os.environ, **self.environment(rank), **(env or {})}
        child = subprocess.Popen([*inside, *argv], env=merged, start_new_session=True)
        self._children.append(child)
        if self.rate == LOOPBACK:
            self._keep(child.pid)
        return child

    def cut(self, host: int) -> None:
        """Pull the plug between a host and the others: packets get lost, and no connection closes."""
        self._run(self.hosts, f"ip link set port{host} nomaster")

    def mend(self, host: int) -> None:
        """Plug it in again. TCP sends what got lost once more, later the longer the cut was."""
        self._run(self.hosts, f"ip link set port{host} master bridge")

    def wait(self, grace: float = 30.0) -> list[int]:
        """Exit codes of all that was started. After a first failure the others have `grace` seconds left to live."""
        deadline = math.inf
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

    def links(self) -> Iterator[Link]:
        """Each host's link to the host after it, measured one by one as they are asked for; needs two hosts."""
        if self.hosts < 2:
            raise ValueError("to measure a link takes two hosts")
        for source in range(self.hosts):
            target = (source + 1) % self.hosts
            rate = min(
                self.link_rate(source), self.link_rate(target), key=lambda rate: bits_per_second(rate) or math.inf
            )
            with self._connected(source, target) as ends:
                round_trip = _round_trip(*ends)
                bytes_per_second = _stream(*ends)
            yield Link(source, target, rate, bytes_per_second, round_trip)

    def close(self) -> None:
        """End what still runs and take the network away. May be called twice."""
        self._stop_children()
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()  # it kills whoever left the sessions of the children
            self._keeper.wait()
            self._keeper = None
        for namespaces in (self._networks, self._names):
            while namespaces:
                os.close(namespaces.pop())

    def _build(self) -> None:
        for host in range(self.hosts):
            network, name = _in_thread(partial(_new_host, f"host{host}"))
            self._networks.append(network)
            self._names.append(name)
        self._networks.append(_in_thread(_new_network))
        bridge = self.hosts
        self._run(bridge, "ip link add bridge type bridge forward_delay 0")
        self._run(bridge, "ip link set bridge up")
        for host in range(self.hosts):
            port = f"port{host}"
            # addrgenmode none: no IPv6 link-local address, which gloo could otherwise pick
            self._run(bridge, f"ip link add {port} type veth peer name eth0 netns {_path(self._networks[host])}")
            self._run(bridge, f"ip link set {port} master bridge addrgenmode none up")
            self._run(host, "ip link set lo up")
            self._on_host(host, _set_congestion_control)
            self._run(host, f"ip addr add {self.address(host)}/24 dev eth0")
            self._run(host, "ip link set eth0 addrgenmode none up")
            bits = bits_per_second(self.link_rate(host))
            if bits is not None:
                self._shape(host, "eth0", bits)  # up
                self._shape(bridge, port, bits)  # down
        for host in range(self.hosts):
            self._await_carrier(bridge, f"port{host}")
            self._await_carrier(host, "eth0")

    def _await_carrier(self, index: int, device: str) -> None:
        """Until then the kernel drops what the device sends, and TCP sends it again only after a second."""
        deadline = time.monotonic() + _CARRIER_SECONDS
        while not self._on_host(index, partial(_is_running, device)):
            if time.monotonic() > deadline:
                raise LabError(f"{device} of network {index} has no carrier after {_CARRIER_SECONDS:.0f} s")
            time.sleep(0.005)

    def _shape(self, index: int, device: str, bits: float) -> None:
        burst = max(2 * _GSO_BYTES, int(bits / 8 * _BURST_SECONDS))
        limit = burst + int(bits / 8 * _QUEUE_SECONDS)
        try:
            self._run(index, f"tc qdisc add dev {device} root tbf rate {int(bits)}bit burst {burst} limit {limit}")
        except LabError as error:
            if re.search("qdisc kind is unknown|No such file", str(error)) is None:
                raise
            cure = "`modprobe sch_tbf`, or take a kernel with CONFIG_NET_SCH_TBF"
            raise LabError(f"this kernel lacks sch_tbf: {cure}") from error

    def _start_keeper(self) -> None:
        owner = "network" if self._networks else "session"
        argv = [sys.executable, "-I", "-S", str(_KEEPER), owner]
        # it holds the namespaces too: the number of one that is gone may soon be another's
        self._keeper = subprocess.Popen(
            argv, stdin=subprocess.PIPE, bufsize=0, pass_fds=self._networks, start_new_session=True
        )
        for network in self._networks[: self.hosts]:
            self._keep(os.fstat(network).st_ino)

    def _keep(self, owner: int) -> None:
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(f"{owner}\n".encode())

    def _run(self, index: int, command: str) -> None:
        argv = ["nsenter", f"--net={_path(self._networks[index])}", "--", *command.split()]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LabError(f"`{command}` failed: {done.stderr.strip()}")

    def _on_host(self, host: int, make: Callable[[], T]) -> T:
        """Call `make` inside the host's network; a socket made there stays there."""
        if not self._networks:
            return make()

        def inside() -> T:
            _libc("setns", self._networks[host], _CLONE_NEWNET)
            return make()

        return _in_thread(inside)

    @contextlib.contextmanager
    def _connected(self, source: int, target: int) -> Iterator[tuple[socket.socket, socket.socket]]:
        with self._on_host(target, socket.socket) as listener, self._on_host(source, socket.socket) as sender:
            listener.bind((self.address(target), 0))
            listener.listen(1)
            sender.connect(listener.getsockname())
            receiver, _ = listener.accept()
            with receiver:
                yield sender, receiver

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
            # Also what a finished command left behind in its session; where there are namespaces the keeper ends that,
            # and the number of a child that was waited for may be a stranger's by now.
            if child.returncode is None or not self._networks:
                _signal_session(child, signal.SIGKILL)
            child.wait()


def _signal_session(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # everybody in it has ended
        os.killpg(child.pid, number)


def _libc(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise LabError(f"{name}: {os.strerror(code)}: is this a container without CAP_SYS_ADMIN?")


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _new_host(name: str) -> tuple[int, int]:
    """Move the calling thread to a host of that name; returns file descriptors of its network and of its name."""
    _libc("unshare", _CLONE_NEWUTS)
    socket.sethostname(name)
    return _new_network(), _hold("uts")


def _new_network() -> int:
    """Move the calling thread into a fresh network namespace; returns a file descriptor that keeps it alive."""
    _libc("unshare", _CLONE_NEWNET)
    return _hold("net")


def _hold(kind: str) -> int:
    return os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def _is_running(device: str) -> bool:
    with socket.socket() as any_socket:
        flags = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sh22x", device.encode(), 0))
    return bool(struct.unpack_from("16xh", flags)[0] & _IFF_RUNNING)


def _set_congestion_control() -> None:
    """For the calling thread's network namespace."""
    setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    try:
        setting.write_text(_CONGESTION_CONTROL)
    except OSError as error:
        raise LabError(f"{setting}: {error.strerror}: is this a container that mounts it read-only?") from error


def _in_thread(work: Callable[[], T]) -> T:
    """Call `work` on a thread that then ends, so that the namespace it moved to does not stick to the caller."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def _stream(sender: socket.socket, receiver: socket.socket) -> float:
    """Send as fast as it goes; bytes a second at the receiver."""
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
    while time.perf_counter() < start + _SETTLE_SECONDS:  # slow start and the bucket's first burst
        receiver.recv_into(block)
    counted = -_unread(receiver)  # on a busy machine a lot can lie there, which came before or will be read after
    begin = time.perf_counter()
    while time.perf_counter() < begin + _STREAM_SECONDS:
        counted += receiver.recv_into(block)
    measured = (counted + _unread(receiver)) / (time.perf_counter() - begin)
    done.set()
    while receiver.recv_into(block):
        pass
    thread.join()
    return measured


def _unread(receiver: socket.socket) -> int:
    """Bytes that have arrived and not been taken."""
    return int.from_bytes(fcntl.ioctl(receiver, termios.FIONREAD, bytes(4)), sys.byteorder)


def _round_trip(one: socket.socket, other: socket.socket) -> float:
    """Seconds of a byte there and back, the median."""
    seconds = []
    for end in (one, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(_ROUND_TRIPS):
        start = time.perf_counter()
        one.sendall(b".")
        other.sendall(other.recv(1))
        one.recv(1)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def exit_on_sigterm() -> None:
    """Make SIGTERM unwind the stack like Ctrl-C does, so that `with Lab(...)` closes."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _of_host(text: str) -> tuple[int, str]:
    host, equals, rate = text.partition("=")
    if not host.isdigit() or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write it like 3=100mbit, the host first")
    return int(host), rate


def main(given: Sequence[str]) -> None:
    """The command line: one command as every rank, or every link measured."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks lab", description="Run a command on every host of a throttled network."
    )
    add = parser.add_argument
    add("--hosts", type=int, default=4)
    add("--processes", type=int, default=1, help="on each host; ranks are host-major")
    add("--rate", default="1gbit", help="100mbit, 1gbit, ..., none (no throttle), loopback (no root)")
    add("--slow-link", action="append", default=[], type=_of_host, metavar="HOST=RATE", help="repeatable")
    parser.add_argument("command", nargs="*", help="after --; without one, every host's link is measured and printed")
    arguments = parser.parse_args(given)
    exit_on_sigterm()
    failed = []
    try:
        with Lab(
            arguments.hosts,
            arguments.rate,
            processes=arguments.processes,
            slow_links=dict(arguments.slow_link),
        ) as lab:
            if arguments.command:
                for rank in range(lab.world_size):
                    lab.popen(rank, arguments.command)
                for rank, code in enumerate(lab.wait()):
                    if code != 0:
                        failed.append(f"rank {rank} (host {rank // lab.processes}) ended with {code}")
            else:
                for link in lab.links():
                    print(link, flush=True)
                    if not link.as_asked:
                        failed.append(f"outside of {_PARTS[0]:.0%} to {_PARTS[1]:.0%}: {link}")
    except (LabError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    if failed:
        sys.exit("; ".join(failed))
