"""Who trains together, and where they meet again when one of them is lost.

Each process keeps a spare store, so any of them may die. Those who notice a loss meet at the store of the first member
that answers, their leader. It waits until every member of the last world has come, is proven dead, or was silent for
too long. Then it decides alone who is in the next world, and writes that to each of them.

At most one part of a world trains on, because a decision needs a majority, and works only if all that it names take it:

- A decision names the ticket that a member drew when it came. Who has gone to another leader has another ticket, does
  not take the decision, and then no group forms.
- Who takes a decision may die before its group has formed, or never learn that it has. So the next decision needs a
  majority of both worlds: of each one since the last that is known to have formed. Members bring these along.
- Members that are proven dead do not count: their host refuses connections to their store, as seen from that host.
  Only for a member that was itself silent for too long they do: they may have gone on without it, and ended.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

import torch.distributed as dist

from ringstrategy.errors import LeftBehindError, PeerLostError
from ringstrategy.failure.reach import address_towards
from ringstrategy.failure.store import BoundedStore, Clock, StoreSilentError, within
from ringstrategy.membership.worlds import (
    Arrival,
    Decision,
    Member,
    Membership,
    State,
    World,
    is_majority,
    members_of,
    membership,
    since_formed,
)
from ringstrategy.transport.connect import this_host
from ringstrategy.transport.exposure import bound_to
from ringstrategy.transport.gloo import break_off_default

JOIN = "RINGSTRATEGY_JOIN"  # the variable with addresses of members, for a process that is to join them
_CONNECT_SECONDS = 0.5  # longer than any round trip
_ANSWER_SECONDS = 1.0  # a store that lives answers from a thread of its own, whatever its process computes
_FORMING_SECONDS = 20.0  # from the decision until all members are connected
_LONGEST_POLL_SECONDS = 0.1
_ROUNDS = 10  # of waiting as long as the patience, until a regroup gives up


class Members:
    """One process among those that train together, for its whole life. One thread may use it.

    Args:
        patience: how long a member that is not proven dead may be silent.
        listen_on: the address at which other hosts reach the spare store of this process. By default the one from
            which this host reaches MASTER_ADDR, or loopback if there is no MASTER_ADDR.
        clock: by which this process waits; None: the machine's.

    Attributes:
        me: this process.
        now: its place in the last world whose process group has formed here; None before.
    """

    def __init__(self, patience: timedelta, listen_on: str | None = None, clock: Clock | None = None) -> None:
        self._patience = patience.total_seconds()
        self._clock: Clock = time if clock is None else clock
        self._seconds = _seconds if clock is None else clock.monotonic
        listen_on = listen_on or address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1")) or "127.0.0.1"
        bound = bound_to(listen_on, 0)
        port, descriptor = (0, None) if bound is None else (bound.getsockname()[1], bound.detach())
        server = dist.TCPStore(listen_on, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        self.me = Member(uuid.uuid4().hex, f"{listen_on}:{server.port}", this_host(), _network())
        self.now: Membership | None = None
        self._own = BoundedStore(server, _ANSWER_SECONDS)
        self._own.set("name", self.me.name)
        self._worlds: tuple[World, ...] = ()  # since the last that is known to have formed
        self._taken: Decision | None = None
        self._beat_at, self._silent_until = self._seconds(), -math.inf
        self._known: dict[str, BoundedStore] = {}  # spare stores, by name
        self._answered: set[str] = set()  # tickets of newcomers that were let in, or went away
        self._tell(leads=False)

    # The beginning

    def found(self) -> Membership:
        """Exchange names and addresses through the store of the default process group; every rank calls it."""
        rank, size = dist.get_rank(), dist.get_world_size()
        base = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"ringstrategy/members/{base.add(f'ringstrategy/founded/{rank}', 1)}", base)
        store.set(str(rank), json.dumps(self.me))
        members = [Member(*json.loads(store.get(str(other)))) for other in range(size)]
        local = [
            rank
            for rank, member in enumerate(members)
            if ipaddress.ip_address(member.address.rpartition(":")[0]).is_loopback
        ]
        if local and len({member.host for member in members}) > 1:
            raise ValueError(
                f"other hosts cannot reach rank {local[0]} at {members[local[0]].address}: set MASTER_ADDR to an "
                "address of the first host that the others reach, and not to a name that leads to 127.x.x.x there"
            )
        return self.begin(members)

    def begin(self, members: Sequence[Member]) -> Membership:
        """Generation 0 consists of `members`, by rank. All of them say the same."""
        self._form(World(0, tuple(members)))
        assert self.now is not None
        return self.now

    # The next world

    @property
    def belongs(self) -> bool:
        """To a world, perhaps to one that has not formed yet."""
        return bool(self._worlds)

    def beat(self) -> None:
        """This process is not silent: call it at least as often as the patience allows."""
        now = self._seconds()
        if now - self._beat_at > self._patience:
            self._silent_until = now
        self._beat_at = now

    def regroup(self, *, invite: bool = False) -> Membership:
        """Agree with the other members on the next world; then call `apply`.

        Every survivor calls it when it has noticed a loss, and again if `apply` or a later collective fails. It
        leaves all process groups of torch first, so that those who still wait in them come too; close what uses them
        before, such as a Session. With `invite`, all members call it at an agreed point, to let newcomers in.

        Args:
            invite: newcomers that wait at the leader get ranks after the survivors, who keep their order.

        Raises:
            LeftBehindError: the others went on without this process, or too few are left to go on.
        """
        self.beat()
        was_silent = self._seconds() - self._silent_until < self._patience
        leave_groups()
        self._known.clear()  # connections: what was refused may answer now
        silent: set[str] = set()
        end = self._clock.monotonic() + _ROUNDS * self._patience
        while self._clock.monotonic() < end:
            leader = self._find_leader(silent)
            decision = self._lead(invite, was_silent) if leader == self.me else self._follow(leader, silent)
            if decision is not None:
                return self._take(decision)
        raise LeftBehindError(f"the ranks of the last world came to no agreement in {_ROUNDS} rounds")

    def apply(self, timeout: timedelta) -> Membership:
        """Create the default process group of the world that `regroup` or `join` has returned; all its members call it.

        Args:
            timeout: of the group's collectives, over gloo.

        Raises:
            PeerLostError: a member did not come, or died meanwhile: call `regroup` again.
        """
        assert self._taken is not None, "regroup or join first"
        decision = self._taken
        leave_groups()
        place = membership(decision.world, self.me)
        forming = min(timeout, timedelta(seconds=_FORMING_SECONDS))
        # The store now lives in rank 0, also where it was an agent's of torchrun.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        try:
            own = self._open(decision.leader)  # a connection for the group alone, whose calls wait for keys
            own.set_timeout(forming)
            store = dist.PrefixStore(decision.key, own)
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=forming)
        except (RuntimeError, OSError) as error:
            leave_groups()
            cause = f"not all of its {place.size} ranks connected: {str(error).splitlines()[0][:300]}"
            raise PeerLostError(-1, "?", f"while generation {place.generation} formed", cause) from error
        dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)
        store.set_timeout(timeout)
        self._form(decision.world)
        return place

    def _form(self, world: World) -> None:
        self._worlds, self._taken, self.now = (world,), None, membership(world, self.me)
        self.beat()
        self._known.clear()
        self._tell(leads=False)

    def _take(self, decision: Decision) -> Membership:
        self._worlds, self._taken = (*decision.earlier, decision.world), decision
        self._tell(leads=False)
        return membership(decision.world, self.me)

    def _tell(self, *, leads: bool) -> None:
        self._own.set("state", json.dumps(State(leads, self._worlds[-1] if self._worlds else None)))

    # Who leads

    def _find_leader(self, silent: Collection[str]) -> Member:
        """The first member that answers and is not `silent`, or leads all the same."""
        for member in members_of(self._worlds):
            if member == self.me:
                break
            with contextlib.suppress(OSError, RuntimeError):
                state = self._state_of(member)
                self._check_not_left(state)
                if state.leads or member.name not in silent:
                    return member
        return self.me

    def _follow(self, leader: Member, silent: set[str]) -> Decision | None:
        """Wait for the leader's decision; None if there will be none, and another member may lead."""
        ticket, begin, has_led = uuid.uuid4().hex, self._clock.monotonic(), False
        store, here = self._store_of(leader), f"here/{self.me.name}"
        with contextlib.suppress(OSError, RuntimeError):
            try:
                arrival = Arrival(ticket, self._worlds)
                store.set(here, json.dumps(arrival))
                while True:
                    dead = tuple(member.name for member in members_of(self._worlds) if self._is_dead(member))
                    if dead != arrival.dead:
                        arrival = arrival._replace(dead=dead)
                        store.set(here, json.dumps(arrival))
                    state, decided = self._state_of(leader), store.read(f"decided/{ticket}")
                    if decided is not None:
                        return Decision.read(decided)
                    self._check_not_left(state)
                    if has_led and not state.leads:
                        return None
                    has_led |= state.leads
                    waited = self._clock.monotonic() - begin
                    if waited > (3 if has_led else 1) * self._patience:
                        silent.add(leader.name)
                        return None
                    self._pause(waited)
            finally:
                with contextlib.suppress(OSError, RuntimeError):
                    store.forget(here)
        return None

    def _lead(self, invite: bool, was_silent: bool) -> Decision | None:
        """Decide when all are here, proven dead, or late; None if a member of a lower rank leads meanwhile."""
        mine = uuid.uuid4().hex
        begin, dead = self._clock.monotonic(), set[str]()
        self._tell(leads=True)
        try:
            for turn in itertools.count():
                arrivals = self._arrivals(mine)
                dead.update(name for arrival in arrivals.values() for name in arrival.dead)
                worlds = since_formed(arrivals.values())
                missing = [m for m in members_of(worlds) if m.name not in arrivals and m.name not in dead]
                waited = self._clock.monotonic() - begin
                if not missing or waited > self._patience:
                    fallen = {m.name for m in members_of(worlds) if m.name in arrivals and self._is_dead(m)}
                    if not fallen:
                        break
                    dead |= fallen
                    for name in fallen:
                        self._own.forget(f"here/{name}")
                    continue
                member = missing[turn % len(missing)]
                if self._is_dead(member):
                    dead.add(member.name)
                    continue
                with contextlib.suppress(OSError, RuntimeError):
                    state = self._state_of(member)
                    self._check_not_left(state)
                    if state.leads and members_of(worlds).index(member) < members_of(worlds).index(self.me):
                        return None
                self._pause(waited)
            return self._decide(mine, arrivals, worlds, set() if was_silent else dead, invite)
        finally:
            self._tell(leads=False)

    def _arrivals(self, mine: str) -> dict[str, Arrival]:
        """Who is here, by name, with all that they know of."""
        arrivals = {self.me.name: Arrival(mine, self._worlds)}
        asked = set(arrivals)
        while True:
            names = [m.name for m in members_of(w for a in arrivals.values() for w in a.worlds) if m.name not in asked]
            if not names:
                return arrivals
            asked.update(names)
            for name, written in zip(names, self._own.read_all([f"here/{name}" for name in names]), strict=True):
                if written is not None:
                    arrivals[name] = Arrival.read(written)

    def _decide(
        self, mine: str, arrivals: dict[str, Arrival], worlds: tuple[World, ...], dead: set[str], invite: bool
    ) -> Decision:
        lacking = [world for world in worlds if not is_majority(world, arrivals, dead)]
        if lacking:
            here = sum(name in arrivals for name in lacking[0].names)
            verdict = (
                f"only {here} of {len(lacking[0].names)} ranks of the last world can be reached. That is no majority, "
                "so this part stops, because the other part may train on. Is the network between the hosts up?"
            )
            for arrival in arrivals.values():
                self._own.set(f"decided/{arrival.ticket}", json.dumps({"stop": verdict}))
            raise LeftBehindError(verdict)
        members = [member for member in members_of(worlds) if member.name in arrivals]
        tickets = [arrivals[member.name].ticket for member in members]
        if invite:
            for ticket, newcomer in self._waiting():
                self._answered.add(ticket)
                members.append(newcomer)
                tickets.append(ticket)
        world = World(worlds[-1].generation + 1, tuple(members))
        decision = Decision(mine, self.me, world, worlds)
        for member, ticket in zip(members, tickets, strict=True):
            self._own.forget(f"here/{member.name}")
            self._own.set(f"decided/{ticket}", json.dumps(decision))
        return decision

    def _check_not_left(self, state: State) -> None:
        if state.world is None or not self._worlds:
            return
        if state.world.generation >= self._worlds[-1].generation and self.me.name not in state.world.names:
            raise LeftBehindError(
                f"the others train on without this process, in generation {state.world.generation}: it was silent for "
                "longer than their patience. Start it again, so that it joins as a newcomer"
            )

    # Newcomers

    def join(self, addresses: Sequence[str], timeout: timedelta, while_waiting: Callable[[], None]) -> Membership:
        """Wait until members of a job let this process in; then call `apply`.

        Args:
            addresses: "host:port" of spare stores of members; one of them must live.
            timeout: how long to wait.
            while_waiting: called several times a second; may raise to end the wait.

        Raises:
            TimeoutError: nobody has let this process in.
        """
        end, known = self._clock.monotonic() + timeout.total_seconds(), list(addresses)
        while self._clock.monotonic() < end:
            for address in known:
                with contextlib.suppress(OSError, RuntimeError):
                    world = State.read(_required(_connect(address), "state")).world
                    if world is None:
                        continue
                    known = list(dict.fromkeys([*(member.address for member in world.members), *known]))
                    decision = self._knock(world.members[0], end, while_waiting)
                    if decision is not None:
                        return self._take(decision)
                    break
            while_waiting()
            self._pause(1.0)
        raise TimeoutError(f"no member at {', '.join(addresses)} let this process in: does one of them train?")

    def _knock(self, leader: Member, end: float, while_waiting: Callable[[], None]) -> Decision | None:
        """Wait at the one who leads if nobody is lost; None if that is another one by now."""
        ticket, store = uuid.uuid4().hex, self._store_of(leader)
        place = f"newcomer/{store.add('newcomers', 1)}"
        store.set(place, json.dumps((ticket, self.me)))
        try:
            while self._clock.monotonic() < end:
                decided = store.read(f"decided/{ticket}")
                if decided is not None:
                    return Decision.read(decided)
                world = self._state_of(leader).world
                if world is None or world.members[0] != leader:
                    break
                while_waiting()
                self._pause(1.0)
            return None
        finally:
            with contextlib.suppress(OSError, RuntimeError):
                store.forget(place)

    def newcomers(self) -> int:
        """How many wait here to be let in; cheap enough for once a second."""
        return len(self._waiting())

    def _waiting(self) -> list[tuple[str, Member]]:
        """Their tickets, in the order in which they came."""
        came = int(self._own.read("newcomers") or 0)
        waiting = []
        for written in self._own.read_all([f"newcomer/{number}" for number in range(1, came + 1)]):
            if written is not None:
                ticket, member = json.loads(written)
                if ticket not in self._answered and not self._is_dead(Member(*member)):
                    waiting.append((ticket, Member(*member)))
        return waiting

    def _pause(self, waited: float) -> None:
        self._clock.sleep(min(_LONGEST_POLL_SECONDS, max(0.005, waited / 10)))

    def close(self) -> None:
        """Others find this process gone. It leaves no process group."""
        self._known.clear()
        del self._own

    # Stores of others

    def _store_of(self, member: Member) -> BoundedStore:
        """OSError or RuntimeError if it does not answer."""
        if member == self.me:
            return self._own
        if member.name not in self._known:
            self._known[member.name] = BoundedStore(self._open(member), _ANSWER_SECONDS)
        return self._known[member.name]

    @staticmethod
    def _open(member: Member) -> dist.Store:
        store = _connect(member.address)
        if _required(store, "name") != member.name:
            raise ConnectionRefusedError("the port is another process's by now")
        return store

    def _state_of(self, member: Member) -> State:
        """OSError or RuntimeError if it does not answer."""
        try:
            return State.read(self._store_of(member).read("state") or "[false, null]")
        except StoreSilentError:
            raise  # it is asked again when it has answered this
        except RuntimeError:
            self._known.pop(member.name, None)
            raise

    def _is_dead(self, member: Member) -> bool:
        """Whether the member is proven to be dead."""
        if member.network != self.me.network:
            return False  # a firewall may refuse too
        try:
            self._store_of(member).has(["name"])
        except ConnectionRefusedError:
            return True
        except StoreSilentError:
            pass
        except (OSError, RuntimeError):
            self._known.pop(member.name, None)
        return False


def leave_groups() -> None:
    """End all process groups of torch in this process. Who waits in them elsewhere gets an error."""
    if dist.is_initialized():
        break_off_default()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _connect(address: str) -> dist.Store:
    """A client of a spare store. OSError or RuntimeError if it does not answer."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()  # torch's client tries for longer
    # and it waits for ever for a frozen host
    return within(_ANSWER_SECONDS, lambda: dist.TCPStore(host, int(port), timeout=timedelta(seconds=_ANSWER_SECONDS)))


def _required(store: dist.Store, key: str) -> str:
    written = BoundedStore(store, _ANSWER_SECONDS).read(key)
    if written is None:
        raise RuntimeError(f"no {key} is written there")
    return written


def _seconds() -> float:
    """Also while the machine sleeps, on Linux."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _network() -> str:
    """Where an address leads to the same process for all."""
    with contextlib.suppress(OSError):
        return f"{this_host()} {os.readlink('/proc/self/ns/net')}"
    return this_host()
