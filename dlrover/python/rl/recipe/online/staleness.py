# SPDX-License-Identifier: Apache-2.0
"""Which groups are open, and which of them a step may train on: bookkeeping, without a clock or a call.

A group is requested from a rollout member, started there with the weights that are served then, and may run while
other groups are trained on and new weights arrive. The **staleness** of a group is the number of weight versions served
since its oldest token; ``max_staleness`` bounds it.

The bound holds without a discarded sample, by two rules:

* at most ``(max_staleness + 1) * groups_per_step`` groups are open at a time;
* a step takes the stalest of the complete groups, and only if the rest can be trained on in time: of the groups that
  are due within the next ``n`` steps there must be no more than ``n * groups_per_step``. Otherwise it waits.

With ``max_staleness`` 0 a step requests its groups and takes all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlrover.python.rl.recipe.rollout.episodes import Group, GroupKey


@dataclass
class StalenessTracker:
    """The open groups, in the order they were requested.

    Args:
        groups_per_step: that each step trains on.
        max_staleness: see above.
        members: number of rollout members.
        rows: number of prompts; a group's ``prompt_id`` is its row plus a multiple of it.
    """

    groups_per_step: int
    max_staleness: int
    members: int
    rows: int
    open: dict[GroupKey, Group] = field(default_factory=dict)
    _step_ids: set[int] = field(default_factory=set)
    _versions: list[int] = field(default_factory=list)

    def begin_step(self) -> None:
        """Release the prompt ids of the groups that earlier steps took."""
        self._step_ids.clear()

    # -- requesting ---------------------------------------------------------------------------------------------------

    def capacity(self, remaining_steps: int, collected: int = 0) -> int:
        """Number of groups that may be requested; ``remaining_steps`` includes this one, which has ``collected``."""
        return self.groups_per_step * min(self.max_staleness + 1, remaining_steps) - len(self.open) - collected

    def request(self, step: int, rows: Iterable[int]) -> None:
        """Open a group for each row, under a prompt id that no other group has which this step may train on."""
        used = self._step_ids | {group.prompt_id for group in self.open.values()}
        for row in rows:
            prompt_id = row
            while prompt_id in used:
                prompt_id += self.rows
            used.add(prompt_id)
            self._add(Group(prompt_id, step, row=row))
        self.assign_members()

    def retry(self, step: int, groups: Iterable[Group]) -> None:
        for group in groups:
            self._add(Group(group.prompt_id, step, group.retry + 1, group.row, group.member))
        self.assign_members()

    def _add(self, group: Group) -> None:
        self.open[group.key] = group

    def assign_members(self) -> None:
        """Give each group that has not started to the member with the fewest unfinished ones."""
        load = [0] * self.members
        for group in self.open.values():
            load[group.member] += group.started and not group.complete
        for group in self.open.values():
            if not group.started:
                group.member = load.index(min(load))
                load[group.member] += 1

    def groups_of(self, member: int) -> list[Group]:
        """The groups that a member shall have, in order. With a bound lower than before the run went on, some wait."""
        timely = list(self.open.values())[: self.groups_per_step * (self.max_staleness + 1)]
        return [group for group in timely if group.member == member]

    # -- status -------------------------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """The rollouts serve these weights now. A version that was served before takes the run back to it."""
        earlier = [served for served in self._versions if served < version]
        self._versions = [*earlier, version][-self.max_staleness - 2 :]

    def update_status(self, key: GroupKey, started: bool, complete: bool, min_version: int) -> None:
        if group := self.open.get(key):
            group.started, group.complete, group.min_version = started, complete, min_version

    def staleness(self, version: int) -> int:
        """Number of weight versions served since ``version``, of which -1 is the current one; more than the bound if
        it lies before all that are remembered."""
        if version < 0:
            return 0
        if self._versions and version < self._versions[0]:
            return self.max_staleness + 1
        return sum(served > version for served in self._versions)

    def summary(self) -> str:
        groups = [self.groups_of(member) for member in range(self.members)]
        counts = [(sum(group.complete for group in of_member), len(of_member)) for of_member in groups]
        parts = [f"ROLLOUT[{rank}] has {complete} of {total} groups" for rank, (complete, total) in enumerate(counts)]
        return ", ".join(parts)

    # -- taking -------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[Group] | None:
        """Close the ``count`` stalest complete groups and return them; None if the step has to wait."""
        complete = [group for group in self.open.values() if group.complete]
        if len(complete) < count:
            return None
        keys = {group.key for group in sorted(complete, key=lambda group: -self.staleness(group.min_version))[:count]}
        if self._would_be_late([group for group in self.open.values() if group.started and group.key not in keys]):
            return None
        self._step_ids |= {key.prompt_id for key in keys}
        return [self.open.pop(key) for key in list(self.open) if key in keys]

    def _would_be_late(self, rest: Sequence[Group]) -> bool:
        remaining = [self.max_staleness - self.staleness(group.min_version) for group in rest]
        return any(
            sum(steps <= later for steps in remaining) > later * self.groups_per_step
            for later in range(self.max_staleness)
        )

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        groups = [[*group.key, group.row, group.member, group.started] for group in self.open.values()]
        return {"open": groups, "served": list(self._versions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the run that gave ``state`` stood, with any number of members.

        A started group stays on its member, which has it still or generates it again from the same seeds.
        """
        self.open = {}
        for prompt_id, retry, created_step, row, member, started in state["open"]:
            is_member = member < self.members
            self._add(
                Group(prompt_id, created_step, retry, row, member if is_member else 0, started=started and is_member)
            )
        self._versions = list(state["served"])
