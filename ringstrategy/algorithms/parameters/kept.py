"""What groups keep beside their parameters, on its way into checkpoints and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringstrategy.algorithms.parameters.group import Group, Vector


class Kept:
    """State from a checkpoint, for groups that are not bound yet.

    Args:
        state: what `state_of` gave; nothing if there is no checkpoint.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        state = {} if state is None else state
        self._parts: dict[str, dict[str, Tensor]] = dict(state.get("kept", {}))  # by parameter name, then by kind
        self._others: dict[str, dict[str, Tensor]] = dict(state.get("others", {}))

    def state_of(self, groups: Sequence[Group]) -> dict[str, Any]:
        """By parameter name: what its group keeps, the correction that waits, and what no group has taken yet."""
        parts = {name: dict(kinds) for name, kinds in self._parts.items()}
        others = dict(self._others)
        for group in groups:
            for flat in group.flats:
                for name in flat.names:
                    parts.setdefault(name, {})
                due = {"correction": flat.correction} if group.arrived else {}
                for kind, whole in {**flat.memory, **due}.items():
                    for name, part in flat.by_name(whole).items():
                        parts.setdefault(name, {})[kind] = part
            both = {kind: torch.stack([one.values, one.correction]) for kind, one in group.others.items()}
            others |= dict.fromkeys(group.parameters, both)
        # after an exception: what an exchange under way still changes does not match that of other ranks
        torn = any(group.under_way is not None and any(flat.memory for flat in group.flats) for group in groups)
        return {"kept": parts, "others": others, "torn": torn}

    def put_back(self, group: Group) -> None:
        """Keep what this group has for others, which take its parameters over."""
        state = self.state_of([group])
        self._parts, self._others = state["kept"], state["others"]

    def resume(self, group: Group) -> bool:
        """Restore a new group from the checkpoint. False if there is none, or parts of several groups."""
        parts = {name: dict(self._parts.pop(name)) for name in group.parameters if name in self._parts}
        others = {name: self._others.pop(name) for name in group.parameters if name in self._others}
        names = [name for flat in group.flats for name in flat.names]
        if not names or not parts.keys() >= set(names):
            return False
        due = {name: parts[name].pop("correction") for name in names if "correction" in parts[name]}
        # codecs differ in what is kept for them, so only the parameters of a flat must have the same
        alike = all(parts[name].keys() == parts[flat.names[0]].keys() for flat in group.flats for name in flat.names)
        if not alike or 0 < len(due) < len(names):
            return False
        for kind, both in others.get(names[0], {}).items():
            group.others[kind] = Vector.of(both[0].to(group.flats[0].device, copy=True))
            group.others[kind].correction.copy_(both[1])
        group.arrived = bool(due)
        for flat in group.flats:
            for kind in parts[flat.names[0]]:
                flat.memory[kind] = torch.empty_like(flat.correction)
                for name, part in flat.by_name(flat.memory[kind]).items():
                    part.copy_(parts[name][kind])
            for name, part in flat.by_name(flat.correction).items() if due else ():
                part.copy_(due[name])
        return True
