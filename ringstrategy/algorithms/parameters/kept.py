"""What groups keep beside their parameters, on its way into checkpoints and back, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringstrategy.algorithms.parameters.group import Flat, Group, Vector


class Kept:
    """State from a checkpoint, for groups that are not bound yet.

    Attributes:
        counts: of each parameter's group; the same on all ranks.
        shared: each parameter's shared values and outer state; the same on all ranks.
    """

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {}
        self.shared: dict[str, Mapping[str, Any]] = {}
        self._own: dict[str, dict[str, Tensor]] = {}  # by parameter name, then by kind
        self._others: dict[str, dict[str, Tensor]] = {}

    # What all ranks hold alike

    def shared_state(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Counts and shared values of these groups, and what no group has taken yet."""
        counts = {name: group.counts for group in groups for name in group.parameters}
        shared = dict(self.shared)
        for flat in (flat for group in groups for flat in group.flats):
            shared |= {} if flat.shared is None else flat.shared.state_dict()
        return {"counts": self.counts | counts, "shared": shared}

    def load_shared(self, state: Mapping[str, Any]) -> None:
        """Replace it by what `shared_state` gave."""
        self.counts, self.shared = dict(state["counts"]), dict(state.get("shared", {}))

    def take_shared(self, flat: Flat) -> bool:
        """Restore a new flat's shared values, which no other will get; False if those of a parameter are missing."""
        assert flat.shared is not None
        found = flat.shared.load_state_dict(self.shared)
        for name in flat.names:
            self.shared.pop(name, None)
        return found

    # What is this rank's own

    def own_state(self, groups: Sequence[Group]) -> dict[str, Any]:
        """By parameter name: what its group keeps, the correction that waits, and what no group has taken yet."""
        own = {name: dict(kinds) for name, kinds in self._own.items()}
        others = dict(self._others)
        for group in groups:
            for flat in group.flats:
                for name in flat.names:
                    own.setdefault(name, {})
                due = {"correction": flat.correction} if group.arrived else {}
                for kind, whole in {**flat.memory, **due}.items():
                    for name, part in flat.by_name(whole).items():
                        own.setdefault(name, {})[kind] = part
            both = {kind: torch.stack([one.values, one.correction]) for kind, one in group.others.items()}
            others |= dict.fromkeys(group.parameters, both)
        # after an exception: what an exchange under way still changes does not match that of other ranks
        torn = any(group.under_way is not None and any(flat.memory for flat in group.flats) for group in groups)
        return {"kept": own, "others": others, "torn": torn}

    def load_own(self, state: Mapping[str, Any]) -> None:
        """Replace it by what `own_state` gave; by nothing, if it is empty."""
        self._own, self._others = dict(state.get("kept", {})), dict(state.get("others", {}))

    def put_back(self, group: Group) -> None:
        """Keep what this group has for others, which take its parameters over."""
        self.load_own(self.own_state([group]))
        self.shared = self.shared_state([group])["shared"]

    def resume(self, group: Group) -> bool:
        """Restore a new group from the checkpoint. False if there is none, or parts of several groups."""
        own = {name: dict(self._own.pop(name)) for name in group.parameters if name in self._own}
        others = {name: self._others.pop(name) for name in group.parameters if name in self._others}
        names = [name for flat in group.flats for name in flat.names]
        if not names or not own.keys() >= set(names):
            return False
        due = {name: own[name].pop("correction") for name in names if "correction" in own[name]}
        # codecs differ in what is kept for them, so only the parameters of a flat must have the same
        alike = all(own[name].keys() == own[flat.names[0]].keys() for flat in group.flats for name in flat.names)
        if not alike or 0 < len(due) < len(names):
            return False
        for kind, both in others.get(names[0], {}).items():
            group.others[kind] = Vector.of(both[0].to(group.flats[0].device, copy=True))
            group.others[kind].correction.copy_(both[1])
        group.arrived = bool(due)
        for flat in group.flats:
            for kind in own[flat.names[0]]:
                flat.memory[kind] = torch.empty_like(flat.correction)
                for name, part in flat.by_name(flat.memory[kind]).items():
                    part.copy_(own[name][kind])
            for name, part in flat.by_name(flat.correction).items() if due else ():
                part.copy_(due[name])
        return True
