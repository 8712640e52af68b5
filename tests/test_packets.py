"""What packets show: on packets made by hand, and of training steps in the lab."""

from __future__ import annotations

import ipaddress
import socket
import struct

import pytest
from scripts import lines_of, refusal

from benchmarks import lab
from benchmarks.capture import End, Packet, parsed
from benchmarks.packets import Connection, Seen, answers, seen, sockets, stalls, together

HERE, THERE = End("10.77.0.1", 4000), End("10.77.0.2", 5000)
OURS = Connection(HERE, THERE)
MS = 1_000_000


def sent(at_ms: float, first: int, payload: int, acknowledged: int = 0) -> Packet:
    return Packet(round(at_ms * MS), HERE, THERE, first % 2**32, payload, acknowledged % 2**32)


def came(at_ms: float, first: int, payload: int, acknowledged: int = 0) -> Packet:
    return Packet(round(at_ms * MS), THERE, HERE, first % 2**32, payload, acknowledged % 2**32)


def tcp(payload: int, flags: int = 16, options: bytes = b"") -> bytes:
    words = 5 + len(options) // 4
    return struct.pack("!HHIIBBHHH", 4000, 5000, 2**32 - 1, 7, words << 4, flags, 0, 0, 0) + options + bytes(payload)


def ipv4(segment: bytes, protocol: int = 6, options: bytes = b"") -> bytes:
    words = 5 + len(options) // 4
    head = struct.pack("!BBHHHBBH4s4s", 64 + words, 0, 4 * words + len(segment), 0, 0, 64, protocol, 0, *ADDRESSES)
    return bytes(12) + b"\x08\x00" + head + options + segment


def ipv6(segment: bytes, protocol: int = 6) -> bytes:
    addresses = (ipaddress.ip_address(text).packed for text in ("fd00::1", "::ffff:10.77.0.2"))
    return (
        bytes(12) + b"\x86\xdd" + struct.pack("!IHBB16s16s", 6 << 28, len(segment), protocol, 64, *addresses) + segment
    )


ADDRESSES = [ipaddress.ip_address(end.address).packed for end in OURS]


def test_headers_are_read_however_long_they_are():
    for payload, options in ((0, b""), (1, bytes(12)), (48, bytes(40)), (65160, b"")):
        expected = Packet(9, HERE, THERE, 2**32 - 1, payload, 7)
        assert parsed(ipv4(tcp(payload, options=options))[:128], 9) == expected
        assert parsed(ipv4(tcp(payload, options=options[:12]), options=bytes(8))[:128], 9) == expected
        expected = expected._replace(source=End("fd00::1", 4000))
        assert parsed(ipv6(tcp(payload, options=options))[:128], 9) == expected
        assert expected.after == (payload - 1) % 2**32
    for frame in (ipv4(bytes(8), protocol=17), ipv6(bytes(8), protocol=58), bytes(12) + b"\x08\x06" + bytes(28)):
        assert parsed(frame, 0) is None, "not TCP"


def test_an_ack_is_late_if_it_is_sent_long_after_the_data_came():
    line = [came(0, 100, 48), sent(41, 0, 0, acknowledged=148)]
    assert seen(line, [OURS], HERE.address) == Seen(pure_acks=1, late_acks=1, longest_ack_ns=41 * MS)
    early = [came(0, 100, 48), sent(29, 0, 0, acknowledged=148)]
    assert seen(early, [OURS], HERE.address) == Seen(pure_acks=1, longest_ack_ns=29 * MS)
    carried = [came(0, 100, 48), sent(41, 0, 500, acknowledged=148)]
    assert seen(carried, [OURS], HERE.address) == Seen(
        data_packets=1, payload_bytes=500, late_acks=1, longest_ack_ns=41 * MS
    )
    repeated = [came(0, 100, 48), sent(1, 0, 0, acknowledged=148), sent(41, 0, 0, acknowledged=148)]
    assert seen(repeated, [OURS], HERE.address).late_acks == 0


def test_one_late_ack_of_several_packets_is_one_and_as_late_as_the_first():
    line = [came(0, 0, 10), came(20, 10, 10), sent(40, 0, 0, acknowledged=5), sent(45, 0, 0, acknowledged=20)]
    [answer] = answers(line, THERE)
    assert (answer.packet, answer.delay_ns, answer.everything) == (line[3], 45 * MS, True)
    part = [came(0, 0, 10), came(20, 10, 10), sent(40, 0, 0, acknowledged=10)]
    assert [answer.everything for answer in answers(part, THERE)] == [False]
    # sequence numbers begin again
    line = [came(0, 2**32 - 10, 48), sent(1, 0, 0, acknowledged=2**32 - 5), sent(50, 0, 0, acknowledged=38)]
    assert [answer.delay_ns for answer in answers(line, THERE)] == [50 * MS]


def test_data_stall_if_they_leave_as_soon_as_a_late_ack_has_come():
    nagle = [sent(0, 0, 10), came(40, 0, 0, acknowledged=10), sent(40.05, 10, 10), came(40.2, 0, 0, acknowledged=20)]
    assert list(stalls(nagle, HERE)) == [nagle[2]]
    assert seen(nagle, [OURS], HERE.address) == Seen(data_packets=2, payload_bytes=20, stalls=1)
    for changed in (
        [nagle[0], came(0.1, 0, 0, acknowledged=10), sent(0.15, 10, 10)],  # the ACK is not late
        [nagle[0], nagle[1], sent(40.2, 10, 10)],  # nothing waited for it
        [nagle[0], came(40, 0, 5, acknowledged=10), sent(40.05, 10, 10)],  # it came with data: an answer to them
        [nagle[0], sent(39, 10, 10), nagle[1], sent(40.05, 20, 10)],  # something is still under way
        [nagle[0], nagle[1]],
    ):
        assert list(stalls(changed, HERE)) == []


def test_messages_on_other_connections_are_counted_apart():
    store = End(HERE.address, 6000), End(THERE.address, 29500)
    line = [
        sent(0, 0, 48),
        sent(1, 48, 96),
        sent(2, 144, 100),
        Packet(3 * MS, *store, 0, 9, 0),
        Packet(4 * MS, *store[::-1], 0, 70, 9),
        Packet(5 * MS, *store, 9, 0, 70),
    ]
    assert seen(line, [OURS], HERE.address) == Seen(
        data_packets=3, headers_alone=2, payload_bytes=244, other_messages=1
    )
    assert seen(line, [], HERE.address) == Seen(other_messages=4)
    assert seen([], [OURS], HERE.address) == Seen()


def test_together_the_longest_counts_and_the_others_add_up():
    one, other = Seen(1, 2, 3, 4, 5, 60, 7, 8), Seen(10, 20, 30, 40, 50, 6, 70, 80)
    assert together([one, other]) == Seen(11, 22, 33, 44, 55, 60, 77, 88)
    assert together([]) == Seen()


def test_sockets_of_this_process_and_whether_they_have_nodelay():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ends = End(*one.getsockname()), End(*other.getsockname())
            found = sockets()
            assert (found[Connection(*ends)], found[Connection(*ends[::-1])]) == (True, False)
        assert not {Connection(*ends), Connection(*ends[::-1])} & sockets().keys()


@pytest.mark.nightly
@pytest.mark.skipif(lab.missing() is not None, reason=f"no network namespaces: {lab.missing()}")
def test_the_packets_of_a_training_step(tmp_path):
    arguments = ["--hosts", "2", "--rate", "100mbit", "--width", "16", "--steps", "5", "--rounds", "2"]
    arguments += ["--cases", "=ring,=ring_int8", "--pcap", str(tmp_path)]
    rows = {row["case"]: row for row in lines_of("packets", tmp_path / "rows.jsonl", *arguments)}
    assert list(rows) == ["ddp", "compute alone", "ring", "ring_int8"]
    few_questions = 1  # a step, to the store: only a rank that waits for long asks it
    alone = rows.pop("compute alone")
    assert alone["data_packets"] == alone["pure_acks"] == [0, 0]
    assert max(alone["other_messages"]) < few_questions
    for row in rows.values():
        assert row["benchmark"] == "packets"
        assert row["ranks_identical"] is True
        assert len(row["data_packets"]) == row["hosts"] == 2
        assert all(
            0 < headers < every for headers, every in zip(row["headers_alone"], row["data_packets"], strict=True)
        )
        assert row["sockets"] == row["sockets_with_nodelay"] == 2, "one connection, seen from both its ends"
        assert row["longest_ack_seconds"] > 0
        assert row["stalls"] < 5 * row["hosts"], "Nagle's algorithm would stall most steps"
        assert row["bytes_sent"] is None or all(
            row["bytes_sent"] < payload < 1.5 * row["bytes_sent"] for payload in row["payload_bytes"]
        ), "gradients and gloo's headers, and what TCP may send twice"
    assert rows["ring_int8"]["bytes_sent"] < 0.3 * rows["ring"]["bytes_sent"]
    for name in ("ring", "ring_int8"):
        assert max(rows[name]["other_messages"]) < few_questions
    assert {file.name for file in tmp_path.glob("*.pcap")} == {"host0-of-2.pcap", "host1-of-2.pcap"}


def test_without_a_network_between_hosts_it_refuses(capsys):
    for options in (["--rate", "loopback"], ["--processes", "2"], ["--hosts", "1"]):
        assert "packets are captured between hosts: not with --rate loopback" in refusal(["packets", *options], capsys)
