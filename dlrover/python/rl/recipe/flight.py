"""Which groups of samples are under way, and which of them a step may train on: bookkeeping, without a clock or a call.

A group is the samples of one prompt. It is asked of a rollout member, begun there by the weights that are served then,
and may be under way while others are trained on and new weights arrive. How far its oldest token lies behind is its
**staleness**, counted in weights served since; ``max_staleness`` bounds it.

The bound holds without a sample thrown away, by two rules:

* at most ``(max_staleness + 1) * groups_per_step`` groups are open at a time;
* a step takes the oldest of those that are complete, and only if the rest can be trained on in time: of the groups that
  have to go within the next ``n`` steps there must be no more than ``n * groups_per_step``. Otherwise it waits.

With ``max_staleness`` 0 that is: a step asks for its groups and takes all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

Key: TypeAlias = tuple[int, int, int]
"""``(prompt_id, attempt, begun_at)``."""


@dataclass(frozen=True)
class Group:
    """The samples of one prompt.

    Attributes:
        prompt_id: no two open groups have the same, except further attempts at one.
        row: which problem.
        begun_at: the step that asked for it; its samples depend on it.
        attempt: how often the prompt was drawn before in that step, for its failures.
        member: the rollout's rank.
        begun: whether that has begun it, so that it stays there.
        complete: whether all of its samples are there.
        oldest: version of the weights that drew its oldest token, -1 for none yet.
    """

    prompt_id: int
    row: int
    begun_at: int
    attempt: int = 0
    member: int = 0
    begun: bool = False
    complete: bool = False
    oldest: int = -1

    @property
    def key(self) -> Key:
        """Names it among the open ones."""
        return self.prompt_id, self.attempt, self.begun_at


@dataclass
class Flight:
    """The open groups, in the order they were asked for.

    Args:
        groups_per_step: how many each step trains on.
        max_staleness: see above.
        members: how many rollouts there are.
        rows: how many problems; a group's ``prompt_id`` is its row plus a multiple of it.
    """

    groups_per_step: int
    max_staleness: int
    members: int
    rows: int
    open: dict[Key, Group] = field(default_factory=dict)
    _taken: set[int] = field(default_factory=set)
    _served: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """A step begins: what earlier ones have taken is trained on."""
        self._taken.clear()

    # -- asking -------------------------------------------------------------------------------------------------------

    def room(self, steps_left: int, kept: int = 0) -> int:
        """How many groups may be asked for now.

        Args:
            steps_left: with this one.
            kept: how many this one has already.
        """
        return self.groups_per_step * min(self.max_staleness + 1, steps_left) - len(self.open) - kept

    def ask(self, step: int, rows: Iterable[int]) -> None:
        """Ask for a group of each of these problems, under a number that no other has which this step may train on."""
        taken = self._taken | {group.prompt_id for group in self.open.values()}
        for row in rows:
            prompt_id = row
            while prompt_id in taken:
                prompt_id += self.rows
            taken.add(prompt_id)
            self._add(Group(prompt_id, row, step))
        self.spread()

    def ask_again(self, step: int, groups: Iterable[Group]) -> None:
        """Ask for other samples of the same prompts."""
        for group in groups:
            self._add(Group(group.prompt_id, group.row, step, group.attempt + 1, group.member))
        self.spread()

    def _add(self, group: Group) -> None:
        self.open[group.key] = group

    def spread(self) -> None:
        """Give each group that has not been begun to the member with the fewest unfinished ones."""
        load = [0] * self.members
        for group in self.open.values():
            load[group.member] += group.begun and not group.complete
        for group in self.open.values():
            if not group.begun:
                member = load.index(min(load))
                load[member] += 1
                self.open[group.key] = replace(group, member=member)

    def of(self, member: int) -> list[Group]:
        """What a member shall have, in the order to begin it.

        A run that goes on with a lower bound may have more open than it can train on in time: these wait their turn.
        """
        timely = list(self.open.values())[: self.groups_per_step * (self.max_staleness + 1)]
        return [group for group in timely if group.member == member]

    # -- hearing ------------------------------------------------------------------------------------------------------

    def serves(self, version: int) -> None:
        """The rollouts serve these weights from now on. A version that was served before takes the run back to it."""
        known = [earlier for earlier in self._served if earlier < version]
        self._served = [*known, version][-self.max_staleness - 2 :]

    def heard(self, key: Key, begun: bool, complete: bool, oldest: int) -> None:
        """What a member says of one of its groups."""
        if key in self.open:
            self.open[key] = replace(self.open[key], begun=begun, complete=complete, oldest=oldest)

    def staleness(self, version: int) -> int:
        """How many weights have been served since ``version``; -1 stands for those served now.

        What lies behind all that are remembered is staler than anything may be.
        """
        if version < 0:
            return 0
        if self._served and version < self._served[0]:
            return self.max_staleness + 1
        return sum(served > version for served in self._served)

    # -- taking -------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[Group] | None:
        """``count`` complete groups to train on now, the oldest, which are open no longer; None: wait for more."""
        complete = [group for group in self.open.values() if group.complete]
        if len(complete) < count:
            return None
        taken = {group.key for group in sorted(complete, key=lambda group: -self.staleness(group.oldest))[:count]}
        if self._too_late([group for group in self.open.values() if group.begun and group.key not in taken]):
            return None
        self._taken |= {prompt_id for prompt_id, _, _ in taken}
        return [self.open.pop(key) for key in list(self.open) if key in taken]

    def _too_late(self, rest: Sequence[Group]) -> bool:
        """Whether some of these could not be trained on in time by the steps after this one."""
        steps_left = [self.max_staleness - self.staleness(group.oldest) for group in rest]
        return any(
            sum(left <= after for left in steps_left) > after * self.groups_per_step
            for after in range(self.max_staleness)
        )

    def told(self) -> str:
        """How far each member is, in words."""
        groups = [self.of(member) for member in range(self.members)]
        parts = [(sum(group.complete for group in theirs), len(theirs)) for theirs in groups]
        return ", ".join(f"ROLLOUT[{rank}] has {done} of {count} groups" for rank, (done, count) in enumerate(parts))

    # -- lasting ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is open and where, and which weights were served; how far members are, they say themselves."""
        groups = [[*group.key, group.row, group.member, group.begun] for group in self.open.values()]
        return {"open": groups, "served": list(self._served)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the run that gave ``state`` stood; there may be more or fewer members now.

        What was begun stays where it is: that member has it still, or draws it again from the same seeds.
        """
        self.open = {}
        for prompt_id, attempt, begun_at, row, member, begun in state["open"]:
            there = member < self.members
            self._add(Group(prompt_id, row, begun_at, attempt, member if there else 0, begun=begun and there))
        self._served = list(state["served"])
