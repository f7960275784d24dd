"""What both kinds of engines driven by hand have: processes on slots, calls to them, and a place for their tensors."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dlrover.python.rl.common.errors import InvocationError, InvocationTimeout, SessionError, WorkloadDied
from dlrover.python.rl.engine.offload import Part
from dlrover.python.rl.session.session import Crew, Session, current, slots_of
from dlrover.python.rl.session.slots import Wish
from dlrover.python.rl.trainer.port import RAW_CALL, Call, Ref

_SETTLE_S = 5.0
"""How long a call waits for ranks that are still in one that has failed on another rank."""


class HandEngine:
    """An engine of a script. It is described when it is made, and runs from ``build`` to :meth:`release`.

    Attributes:
        name: what messages call it.
    """

    _kind = "ENGINE"
    _session: Session

    def __init__(self, name: str | None) -> None:
        self.name = (name or self._kind).upper()
        self._wished_name = name
        self._crew: Crew | None = None
        self._failed: list[Ref] = []

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
        """End the processes and give the slots back; ``build`` starts anew. Safe to repeat."""
        crew, self._crew, self._failed = self._crew, None, []
        if crew is not None:
            self._session.unseat(crew)

    def _running(self, what: str) -> Crew:
        if self._crew is None:
            raise SessionError(f"{self.name} is not built: call build() before {what}")
        return self._crew

    # -- calls --------------------------------------------------------------------------------------------------------

    def _submit(self, rank: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Ref:
        self._running(method)
        self._failed = unfinished(self._failed, _SETTLE_S)
        if self._failed:  # What they send each other would meet what this call sends.
            ranks, before = ", ".join(str(ref.rank) for ref in self._failed), self._failed[0].method
            raise SessionError(
                f"{self.name} cannot go on with {method}: {before} has failed, and is not over on ranks {ranks}; wait"
                " until they give up, or release() the engine and build() it again"
            )
        call = Call(RAW_CALL, method, tuple(args), dict(kwargs or {}))
        return self._session.hosting.port.submit(self.name, rank, call)

    def _gather(self, refs: Sequence[Ref], timeout_s: float | None = None) -> list[Any]:
        """The results of one call to all ranks; see :meth:`Session.gather`. After a failure the next call waits for the
        other ranks, and is refused while they go on."""
        try:
            return self._session.gather(refs, timeout_s)
        except (InvocationTimeout, WorkloadDied):
            raise  # All are in the same call still; or none will ever go on.
        except InvocationError:
            self._failed = list(refs)
            raise

    def _ask(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method of every rank's object; the results in rank order."""
        ranks = range(len(self._running(method).seats))
        return self._gather([self._submit(rank, method, args) for rank in ranks], timeout_s)

    # -- places -------------------------------------------------------------------------------------------------------

    def cpu(self) -> None:
        """Move everything to host memory and free the devices; a key-value cache is dropped."""
        self._ask("engine.cpu")

    def cuda(self, *parts: Part) -> None:
        """Bring the tensors back to the devices: all, or only ``"weights"`` or ``"kv_cache"``."""
        for part in parts or ("all",):
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


def unfinished(refs: Sequence[Ref], timeout_s: float) -> list[Ref]:
    """Those of one call that have neither result nor error after ``timeout_s``."""
    left, deadline_s = list(refs), time.monotonic() + timeout_s
    while left:
        outcomes = left[0].port.wait(left, max(0.0, deadline_s - time.monotonic()))
        late = [ref for ref, outcome in zip(left, outcomes, strict=True) if outcome.late]
        if len(late) == len(left):
            break
        left = late  # One that has failed ends the wait for the others.
    return left
