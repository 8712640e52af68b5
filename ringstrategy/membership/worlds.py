"""The worlds of members that an elastic job goes through, and what members write for each other. No input or output."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from ringstrategy.errors import LeftBehindError


class Member(NamedTuple):
    """A process that trains.

    Attributes:
        name: a random word, drawn once for the life of a process.
        address: "host:port" of its spare store.
        host: see `transport.connect.this_host`.
        network: where a refused connection proves that a process has ended; of a host, or a container.
    """

    name: str
    address: str
    host: str
    network: str


class World(NamedTuple):
    """The members of a generation, by rank."""

    generation: int
    members: tuple[Member, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of each member, by rank."""
        return tuple(member.name for member in self.members)

    @classmethod
    def read(cls, written: Any) -> World:
        """From what `json` makes of one."""
        generation, members = written
        return cls(generation, tuple(Member(*member) for member in members))


class Membership(NamedTuple):
    """One process in a world.

    Attributes:
        generation: 0 at the start, and higher after each regroup.
        rank: of this process in this generation.
        members: all processes of the generation, by rank.
    """

    generation: int
    rank: int
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        """How many train."""
        return len(self.members)

    @property
    def names(self) -> tuple[str, ...]:
        """By rank; a name is never used by two processes."""
        return tuple(member.name for member in self.members)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the spare stores, by rank: what a replacement needs to `join`."""
        return tuple(member.address for member in self.members)


class Decision(NamedTuple):
    """Which members are in the next world; `key` is new, later ones may need the `earlier` worlds too."""

    key: str
    leader: Member
    world: World
    earlier: tuple[World, ...]

    @classmethod
    def read(cls, written: str) -> Decision:
        """From the text in a store. LeftBehindError if too few members could be reached."""
        decided = json.loads(written)
        if isinstance(decided, dict):
            raise LeftBehindError(decided["stop"])
        key, leader, world, earlier = decided
        return cls(key, Member(*leader), World.read(world), tuple(map(World.read, earlier)))


class State(NamedTuple):
    """What a member tells everyone who asks: whether it is leading now, and the world that it took last."""

    leads: bool
    world: World | None

    @classmethod
    def read(cls, written: str) -> State:
        """From the text in a store."""
        leads, world = json.loads(written)
        return cls(leads, None if world is None else World.read(world))


class Arrival(NamedTuple):
    """A member that came to a leader, the worlds that it brings, and the names of those that it knows to be dead."""

    ticket: str
    worlds: tuple[World, ...]
    dead: tuple[str, ...] = ()

    @classmethod
    def read(cls, written: str) -> Arrival:
        """From the text in a store."""
        ticket, worlds, dead = json.loads(written)
        return cls(ticket, tuple(map(World.read, worlds)), tuple(dead))


def since_formed(arrivals: Iterable[Arrival]) -> tuple[World, ...]:
    """The worlds since the last one that an arrival knows to have formed, oldest first."""
    arrivals = [arrival for arrival in arrivals if arrival.worlds]
    formed = max(arrival.worlds[0].generation for arrival in arrivals)
    worlds = {world for arrival in arrivals for world in arrival.worlds if world.generation >= formed}
    return tuple(sorted(worlds, key=lambda world: (world.generation, world.names)))


def members_of(worlds: Iterable[World]) -> list[Member]:
    """All members, in the order of ranks, those of earlier worlds first."""
    return list(dict.fromkeys(member for world in worlds for member in world.members))


def is_majority(world: World, here: Collection[str], dead: Collection[str]) -> bool:
    """Are most of the living members of `world` here? Of two halves, the one with the lowest rank counts as most."""
    alive = [name for name in world.names if name not in dead]
    count = sum(name in here for name in alive)
    return 2 * count > len(alive) or (2 * count == len(alive) and (not alive or alive[0] in here))


def membership(world: World, me: Member) -> Membership:
    """The place of `me` in the world."""
    return Membership(world.generation, world.names.index(me.name), world.members)
