"""Process sets: some of the ranks, among which an operation runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from ringstrategy.integrations.horovod.members import Members

NOT_INITIALIZED = "Horovod has not been initialized; call hvd.init() first, on every rank"


class ProcessSet:
    """Some of the ranks; pass it as `process_set=`. In use from `hvd.init(process_sets=...)` or `add_process_set` on.

    Args:
        ranks: of all ranks. None: all of them.

    Attributes:
        ranks: in rising order; None before it is in use, if they are all.
        process_set_id: 0 for all ranks; None while it is not in use.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self.ranks = None if ranks is None else sorted(set(ranks))
        self.process_set_id: int | None = None
        self._members: Members | None = None
        self._groups: list[dist.ProcessGroup] = []
        self._lent: Counter[dist.ProcessGroup] = Counter()  # to how many optimizers

    def __repr__(self) -> str:
        """As Horovod shows it."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def begin(
        self, process_set_id: int, ranks: Sequence[int], members: Members | None, groups: Sequence[dist.ProcessGroup]
    ) -> None:
        """It is in use, and owns the groups; `members` is None on ranks that do not belong to it.

        The first group is that of `members`; the second one, which the set of all ranks has not, is for optimizers.
        """
        self.process_set_id, self.ranks, self._members = process_set_id, list(ranks), members
        self._groups = list(groups)

    def lend_group(self) -> dist.ProcessGroup:
        """For an optimizer, beside others whose messages carry tags; not that of `members`, which calls collectives."""
        group = self._groups[1]
        self._lent[group] += 1
        return group

    def take_group_back(self, group: dist.ProcessGroup) -> None:
        """An optimizer that got it is closed. No collective."""
        self._lent[group] -= 1
        if group not in self._groups:
            self._destroy(group)

    def end(self) -> None:
        """It is not in use any more. No collective."""
        members, self._members, self.process_set_id = self._members, None, None
        if members is not None:
            members.close()

    def destroy_groups(self) -> None:
        """After `end`, while others go on; that of optimizers when the last one is closed. No collective."""
        groups, self._groups = self._groups, []
        for group in groups:
            self._destroy(group)

    def _destroy(self, group: dist.ProcessGroup) -> None:
        """Unless an optimizer has it, or it has been already, such as with all of them."""
        if not self._lent[group] and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)

    @property
    def in_use(self) -> bool:
        """Whether all ranks know it."""
        return self.process_set_id is not None

    @property
    def members(self) -> Members:
        """Joined. ValueError with the cure if this rank is none of them, or nobody knows the set."""
        if self.process_set_id is None or self.ranks is None:
            raise ValueError(self._not_in_use())
        if self._members is None:
            raise ValueError(f"this rank is not in {self}: put the operation behind `if process_set.included():`")
        return self._members

    def included(self) -> bool:
        """Whether this rank belongs to it."""
        if not self.in_use:
            raise ValueError(self._not_in_use())
        return self._members is not None

    def rank(self) -> int:
        """Of this process, within the set."""
        return self.members.rank

    def size(self) -> int:
        """How many ranks it has."""
        if self.ranks is None or not self.in_use:
            raise ValueError(self._not_in_use())
        return len(self.ranks)

    def _not_in_use(self) -> str:
        return NOT_INITIALIZED if self is global_process_set else f"{self} is not in use: call hvd.add_process_set"


global_process_set = ProcessSet()
