"""Which slots an engine gets: integer arithmetic, and its refusals.

A *slot* is a device of the session, known by its number; the slots of a node are numbered consecutively. An engine has
*groups* of slots, each with the ranks that together hold the model once.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from dlrover.python.rl.common.errors import SessionError
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.runtime.hosting import Device

Group = tuple[int, ...]


@dataclass(frozen=True)
class Wish:
    """What an engine asks for.

    Attributes:
        group: slots of one group.
        groups: how many; None for as many as there is room for.
        one_node: whether the slots of a group have to be on one node.
        colocate_with: slots to share, all of them and no others; None for free ones.
        apart_from: slots not to share.
        nodes: addresses or ids of the nodes to use; None for all.
    """

    group: int
    groups: int | None = None
    one_node: bool = False
    colocate_with: Group | None = None
    apart_from: frozenset[int] = frozenset()
    nodes: tuple[str, ...] | None = None


class SlotTable:
    """Who holds which slots.

    Args:
        devices: one for each slot.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._held: dict[str, Group] = {}

    @property
    def free(self) -> Group:
        """The slots that nobody holds."""
        held = {slot for slots in self._held.values() for slot in slots}
        return tuple(slot for slot in range(len(self.devices)) if slot not in held)

    def room(self, wish: Wish) -> Group:
        """The slots that ``wish`` may choose from.

        Raises:
            SessionError: a node is unknown; or the slots to share are not all on the wished nodes, or not to be shared.
        """
        allowed = self._on(wish.nodes)
        if wish.colocate_with is None:
            return tuple(slot for slot in self.free if slot in allowed and slot not in wish.apart_from)
        shared = set(wish.colocate_with)
        if both := sorted(shared & wish.apart_from):
            raise SessionError(f"slots {both} cannot be shared and not be shared: colocate_with and not_colocate_with")
        if outside := sorted(shared - allowed):
            raise SessionError(f"slots {outside} of colocate_with are not on the nodes {', '.join(wish.nodes or ())}")
        return wish.colocate_with

    def take(self, owner: str, wish: Wish) -> list[Group]:
        """Give ``owner`` the slots of its wish; returns its groups.

        Raises:
            SessionError: it holds some already, a size is not positive, or the slots are not there. Nothing is taken.
        """
        if owner in self._held:
            raise SessionError(f"{owner} holds the slots {list(self._held[owner])} already")
        if wish.group < 1 or (wish.groups is not None and wish.groups < 1):
            raise SessionError(f"{owner} asks for {wish.groups} groups of {wish.group} slots: both must be positive")
        room = self.room(wish)
        groups = self._cut(room, wish)
        wanted = len(groups) if wish.groups is None else wish.groups
        left_over = wish.colocate_with is not None and wanted * wish.group != len(room)
        if not wanted or len(groups) < wanted or left_over:
            raise SessionError(self._lacking(owner, wish, room))
        self._held[owner] = tuple(slot for group in groups[:wanted] for slot in group)
        return groups[:wanted]

    def give_back(self, owner: str) -> None:
        """Whoever shares the slots keeps them."""
        self._held.pop(owner, None)

    def _on(self, nodes: Collection[str] | None) -> set[int]:
        if nodes is None:
            return set(range(len(self.devices)))
        known = {name for device in self.devices for name in (device.address, device.node)}
        for name in nodes:
            if name not in known:
                raise SessionError(f"no node '{name}'{hint(name, {device.address for device in self.devices})}")
        return {slot for slot, device in enumerate(self.devices) if {device.address, device.node} & set(nodes)}

    def _cut(self, room: Group, wish: Wish) -> list[Group]:
        """Consecutive slots in whole groups; what is left over is not in any."""
        rows = [room]
        if wish.one_node:
            rows = [tuple(slots) for _, slots in groupby(room, key=lambda slot: self.devices[slot].node)]
        size = wish.group
        return [row[start : start + size] for row in rows for start in range(0, len(row) - size + 1, size)]

    def _lacking(self, owner: str, wish: Wish, room: Group) -> str:
        groups = f"{wish.groups} x " if wish.groups is not None else "groups of "
        total = f" = {wish.groups * wish.group}" if wish.groups is not None else ""
        asked = f"{owner} asks for {groups}{wish.group}{total} slots"
        where = " with each group on one node" if wish.one_node and wish.group > 1 else ""
        if wish.colocate_with is not None:
            return f"{asked}{where}, but colocate_with has {len(room)}: {list(room)}"
        held = "; ".join(f"{name} holds {list(slots)}" for name, slots in self._held.items()) or "nobody holds any"
        limits = " on the wished nodes and apart from not_colocate_with" if wish.nodes or wish.apart_from else ""
        return f"{asked}{where}; free{limits} are {list(room)} of {len(self.devices)} ({held})"


def train_sizes(room: int, tensor: int, context: int, replicas: int | None, shards: int | None) -> tuple[int, int]:
    """Fill in the sizes of a train engine that were not given.

    Args:
        room: slots there are.
        tensor: ranks that split each matrix.
        context: ranks that share each sequence.
        replicas: of the model, each with rows of its own; by default as many as fit.
        shards: replicas that have one copy of the parameters between them (ZeRO-3); by default all.

    Returns:
        Groups with a copy of the parameters each, and slots of one group.

    Raises:
        SessionError: a size is not positive, the shards do not divide the replicas, or there is no room for one group.
    """
    given = {
        "tensor_parallel_size": tensor,
        "context_parallel_size": context,
        "data_parallel_size": replicas,
        "shards": shards,
    }
    for name, size in given.items():
        if size is not None and size < 1:
            raise SessionError(f"{name} is {size}: it must be positive")
    replica = tensor * context
    if replicas is None:
        replicas = room // replica
        replicas -= replicas % (shards or 1)
    if not replicas:
        told = ", ".join(f"{name} {size}" for name, size in given.items() if size is not None)
        raise SessionError(f"{room} free slots are too few for one group: {told}")
    shards = shards or replicas
    if replicas % shards:
        raise SessionError(f"data_parallel_size {replicas} is no multiple of shards {shards}")
    return replicas // shards, shards * replica
