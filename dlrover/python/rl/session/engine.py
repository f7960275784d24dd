"""What both kinds of engines driven by hand have: processes on slots, calls to them, and a place for their tensors."""

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from dlrover.python.rl.common.errors import InvocationError, SessionError, WorkloadDied
from dlrover.python.rl.engine.base import Part
from dlrover.python.rl.session.session import Crew, Session, current, slots_of
from dlrover.python.rl.session.slots import Wish
from dlrover.python.rl.trainer.port import RAW_CALL, Call, Ref, gather


class HandEngine:
    """An engine of a script. It is described when it is made, and runs from :meth:`build` to :meth:`release`.

    Attributes:
        name: what messages call it.
    """

    _kind = "ENGINE"
    _session: Session

    def __init__(self, name: str | None) -> None:
        self.name = (name or self._kind).upper()
        self._wished_name = name
        self._crew: Crew | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def built(self) -> bool:
        """Whether it runs."""
        return self._crew is not None

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots it runs on, in rank order.

        Raises:
            SessionError: it is not built.
        """
        return tuple(slot for seat in self._running("slots").seats for slot in seat)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The slots of each of its groups.

        Raises:
            SessionError: it is not built.
        """
        return self._running("groups").groups

    def _may_build(self, ignore: bool) -> bool:
        """Whether to go on and build.

        Raises:
            SessionError: it is built already, and that is not to be ignored.
        """
        if self._crew is not None and not ignore:
            raise SessionError(f"{self.name} is built already, on slots {list(self.slots)}: release() it first")
        return self._crew is None

    def _seat(self, wish: Wish, where: str, whole_groups: bool) -> Crew:
        session = current()
        name = session.enter(self, self._wished_name, self._kind, wish)
        crew = session.start(name, where, whole_groups)
        self.name, self._crew, self._session = name, crew, session
        return crew

    def release(self) -> None:
        """End the processes and give the slots back; :meth:`build` starts anew. Safe to repeat."""
        crew, self._crew = self._crew, None
        if crew is not None:
            self._session.unseat(crew)

    def _running(self, what: str) -> Crew:
        if self._crew is None:
            raise SessionError(f"{self.name} is not built: call build() before {what}")
        return self._crew

    # -- calls --------------------------------------------------------------------------------------------------------

    def _submit(self, rank: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Ref:
        self._running(method)
        call = Call(RAW_CALL, method, tuple(args), dict(kwargs or {}))
        return self._session.hosting.port.submit(self.name, rank, call)

    def _gather(self, refs: Sequence[Ref], timeout_s: float | None = None) -> list[Any]:
        """The results of calls that were submitted; without a deadline the ranks waited for are logged.

        Raises:
            InvocationError: one failed; names engine, rank, method, node and cause.
        """
        try:
            return gather(refs, timeout_s)
        except WorkloadDied as died:
            raise self._at_its_node(died) from died.__cause__

    def _ask(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method of every rank's object; the results in rank order."""
        ranks = range(len(self._running(method).seats))
        return self._gather([self._submit(rank, method, args) for rank in ranks], timeout_s)

    def _at_its_node(self, died: WorkloadDied) -> InvocationError:
        """Only the session knows where a process was that can tell no more."""
        if died.node or died.role != self.name or self._crew is None:
            return died
        process = self._crew.processes[died.rank]
        said = str(died).removeprefix(f"{died.role}[{died.rank}].{died.method}: ")
        text = f"its process {process.pid} is gone: {said}; release() the engine and build() it again"
        node = process.host or socket.gethostname()
        return WorkloadDied(text, role=died.role, rank=died.rank, method=died.method, node=node)

    # -- places -------------------------------------------------------------------------------------------------------

    def cpu(self) -> None:
        """Move everything to host memory and free the devices; a key-value cache is dropped."""
        self._ask("engine.cpu")

    def cuda(self, part: Part = "all") -> None:
        """Bring the tensors back to the devices: all, or only ``"weights"`` or ``"kv_cache"``."""
        self._ask("engine.cuda", part)

    def meta(self) -> None:
        """Release all tensors, on devices and hosts. New weights bring the engine back: ``cuda()``, then a sync."""
        self._ask("engine.meta")

    def device(self) -> str | list[str]:
        """Where the weights are: ``"cpu"``, ``"meta"``, or ``"cuda"`` for the device, also where the host stands in for
        one; of each rank where they differ."""
        places = [str(place) for place in self._ask("engine.place")]
        return places[0] if len(set(places)) == 1 else places

    def footprint(self) -> list[dict[str, int]]:
        """Bytes on the device by kind, for each rank."""
        return self._ask("engine.footprint")

    def release_memory_cache(self) -> None:
        """Give what the allocators keep for later back to the devices; nothing on a CPU."""
        self._ask("engine.release_cache")


def wish_of(
    group: int, groups: int | None, one_node: bool, colocate_with: Any, not_colocate_with: Any, nodes: Any
) -> Wish:
    """The slots that the arguments of ``build`` ask for."""
    return Wish(
        group,
        groups,
        one_node,
        colocate_with=None if colocate_with is None else slots_of(colocate_with),
        apart_from=frozenset() if not_colocate_with is None else frozenset(slots_of(not_colocate_with)),
        nodes=None if nodes is None else tuple(nodes),
    )
