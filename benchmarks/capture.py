"""Write the head of every packet of a network interface to a pcap file, until stdin closes; read such a file.

    python -I -S benchmarks/capture.py eth0 packets.pcap

A process of its own, on the host whose packets it sees; it needs root, and Python alone. Times are the kernel's. An
outgoing packet is seen as it leaves the throttle's queue. What the network card would cut up or has joined (TSO, GRO)
is one packet, of up to 64 KB.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_SNAP = 128  # bytes kept: Ethernet, IPv6 and TCP headers with options take up to 114
_QUEUE_BYTES = 256 << 20  # of the kernel, for packets that wait to be written
_EVERYTHING = 0x0003  # ETH_P_ALL
_SO_RCVBUFFORCE, _SO_TIMESTAMPNS = 33, 35
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_NANOSECOND_PCAP, _ETHERNET = 0xA1B23C4D, 1
_FILE = struct.Struct("=IHHiIII")  # magic, version, zone, accuracy, snap, kind of link
_RECORD = struct.Struct("=IIII")  # seconds, nanoseconds, bytes kept, bytes
_IPV4, _IPV6, _TCP = 0x0800, 0x86DD, 6
_READY = b"ready\n"


class End(NamedTuple):
    """One end of a TCP connection."""

    address: str
    port: int


class Packet(NamedTuple):
    """What the headers of a TCP packet say."""

    time_ns: int  # of the clock of `time.time_ns`
    source: End
    target: End
    first: int  # sequence number of the first byte of payload
    payload: int  # bytes
    acknowledged: int  # the sequence number that is expected next

    @property
    def after(self) -> int:
        """Sequence number of the byte after the payload."""
        return (self.first + self.payload) % 2**32


class Capture:
    """Every packet of an interface goes to the file while this context is open.

    Leaving it raises a RuntimeError if packets were lost.
    """

    def __init__(self, interface: str, file: Path) -> None:
        self._argv = [sys.executable, "-I", "-S", __file__, interface, str(file)]

    def __enter__(self) -> Capture:
        self._process = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != _READY:
            self._process.communicate()
            raise RuntimeError("no packets can be captured here: see the error above")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()
        if self._process.returncode != 0 and error is None:
            raise RuntimeError("the capture is not complete: see the error above")


def read(file: Path) -> list[Packet]:
    """The TCP packets, in order of time."""
    packets, data = [], file.read_bytes()
    place = _FILE.size
    while place < len(data):
        seconds, nanoseconds, kept, _ = _RECORD.unpack_from(data, place)
        place += _RECORD.size
        packet = parsed(data[place : place + kept], seconds * 10**9 + nanoseconds)
        if packet is not None:
            packets.append(packet)
        place += kept
    return sorted(packets, key=lambda packet: packet.time_ns)


def parsed(frame: bytes, time_ns: int) -> Packet | None:
    """What the head of an Ethernet frame says; None if it is not TCP. IPv6 extension headers are not followed."""
    [kind] = struct.unpack_from("!H", frame, 12)
    if kind == _IPV4:
        total, protocol = struct.unpack_from("!2xH5xB", frame, 14)
        tcp, addresses = 14 + 4 * (frame[14] & 15), (frame[26:30], frame[30:34])
        payload = 14 + total - tcp
    elif kind == _IPV6:
        payload, protocol = struct.unpack_from("!4xHB", frame, 14)
        tcp, addresses = 54, (frame[22:38], frame[38:54])
    else:
        return None
    if protocol != _TCP:
        return None
    source, target, first, acknowledged, header = struct.unpack_from("!HHIIB", frame, tcp)
    here, there = (plain(ipaddress.ip_address(raw)) for raw in addresses)
    ends = End(here, source), End(there, target)
    return Packet(time_ns, *ends, first, payload - 4 * (header >> 4), acknowledged)


def plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """In text; an IPv4 address that is written as IPv6, as in sockets for both, as what it is on the wire."""
    return str(getattr(address, "ipv4_mapped", None) or address)


def _capture(interface: str, file: Path) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as tap, file.open("wb") as out:
        tap.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _QUEUE_BYTES)
        tap.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        tap.bind((interface, _EVERYTHING))  # packets come from now on
        out.write(_FILE.pack(_NANOSECOND_PCAP, 2, 4, 0, 0, _SNAP, _ETHERNET))
        os.write(sys.stdout.fileno(), _READY)
        for record in _records(tap):
            out.write(record)
        _, lost = struct.unpack("=II", tap.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
    if lost:
        sys.exit(f"{lost} packets came faster than they could be written: they are missing in {file}")


def _records(tap: socket.socket) -> Iterator[bytes]:
    """Until stdin closes and nothing is left."""
    head = bytearray(_SNAP)
    while True:
        ready, _, _ = select.select([tap, sys.stdin], [], [])
        if tap not in ready:
            return
        # MSG_TRUNC: the count is of the whole packet
        length, ancillary, _, _ = tap.recvmsg_into([head], socket.CMSG_SPACE(16), socket.MSG_TRUNC)
        [(_, _, stamp)] = ancillary
        kept = min(length, _SNAP)
        yield _RECORD.pack(*struct.unpack("@ll", stamp), kept, length) + head[:kept]


if __name__ == "__main__":
    _capture(sys.argv[1], Path(sys.argv[2]))
