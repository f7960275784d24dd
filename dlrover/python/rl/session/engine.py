# SPDX-License-Identifier: Apache-2.0
"""What both kinds of engines driven by hand share: a role group on slots, calls to it, and where its tensors are."""

import time
from collections.abc import Sequence
from typing import Any

from dlrover.python.rl.common.errors import InvocationError, InvocationTimeout, SessionError, WorkloadDied
from dlrover.python.rl.engine.api.weights import Part
from dlrover.python.rl.session.session import Members, Session, SlotRequest, current
from dlrover.python.rl.trainer.port import Pending, Ref
from dlrover.python.rl.trainer.role_group import Invocation
from dlrover.python.rl.trainer.workload import DEFAULT_OPTIONS

_SETTLE_S = 5.0
"""How long a call waits for ranks that are still in a call that has failed on another rank."""

_SUBMIT = DEFAULT_OPTIONS.replace(blocking=False, auto_shard=False)


class HandEngine:
    """An engine of a script: described when it is made, running from ``build`` to :meth:`release`."""

    _kind = "ENGINE"
    _session: Session

    def __init__(self, name: str | None) -> None:
        self.name = (name or self._kind).upper()
        self._requested_name = name
        self._members: Members | None = None
        self._failed: list[Ref] = []

    @property
    def built(self) -> bool:
        return self._members is not None

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(slot for slots in self._running("slots").slots for slot in slots)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        return self._running("groups").groups

    def _should_build(self, ignore_rebuild_error: bool) -> bool:
        if self._members is not None and not ignore_rebuild_error:
            raise SessionError(f"{self.name} is built already, on slots {list(self.slots)}: release() it first")
        return self._members is None

    def _start(self, request: SlotRequest, workload: type, replicas: int | None = None) -> str:
        """Start the members; returns the kind of their devices."""
        session = current()
        members = session.start(self, self._requested_name, self._kind, request, workload, replicas)
        self.name, self._members, self._session = members.name, members, session
        return session.slots[members.slots[0][0]].kind

    def _open(self, *arguments: Any) -> None:
        """Make the engine in each process; where that fails none is left."""
        try:
            self._ask("engine.open", *arguments)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """End the processes and give the slots back; ``build`` starts them again. Safe to repeat."""
        members, self._members, self._failed = self._members, None, []
        if members is not None:
            self._session.end(members)

    def _running(self, use: str) -> Members:
        if self._members is None:
            raise SessionError(f"{self.name} is not built: call build() before {use}")
        return self._members

    # -- calls --------------------------------------------------------------------------------------------------------

    def _submit(self, method: str, *args: Any, **kwargs: Any) -> list[Ref]:
        """Send a call to every rank; only a ``Shard`` is divided."""
        group = self._running(method).role_group
        self._failed = wait_for_ranks(self._failed, _SETTLE_S)
        if self._failed:  # What these ranks send each other would meet what this call sends.
            ranks, before = ", ".join(str(ref.rank) for ref in self._failed), self._failed[0].method
            raise SessionError(
                f"{self.name} cannot go on with {method}: {before} has failed, and is not over on ranks {ranks}; wait"
                " until they give up, or release() the engine and build() it again"
            )
        pending: Pending = Invocation(group, method, _SUBMIT)(*args, **kwargs)
        return pending.refs

    def _gather(self, refs: Sequence[Ref], timeout_s: float | None = None) -> list[Any]:
        """The results of one call to all ranks. After a failure the next call waits for the other ranks, and is refused
        while they go on."""
        try:
            return self._session.gather(refs, timeout_s)
        except (InvocationTimeout, WorkloadDied):
            raise  # All ranks are in the same call still; or the lost one will never go on.
        except InvocationError:
            self._failed = list(refs)
            raise

    def _ask(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        return self._gather(self._submit(method, *args), timeout_s)

    # -- where the tensors are ----------------------------------------------------------------------------------------

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
        """Where the weights are: ``"cpu"``, ``"meta"``, or ``"cuda"`` even where the host stands in for a device; of
        each rank where they differ."""
        devices = [str(device) for device in self._ask("engine.place")]
        return devices[0] if len(set(devices)) == 1 else devices

    def footprint(self) -> list[dict[str, int]]:
        """Bytes on the device by kind, for each rank."""
        return self._ask("engine.footprint")

    def release_memory_cache(self) -> None:
        """Return the memory that the allocators cache to the devices; no effect on a CPU."""
        self._ask("engine.release_cache")


def wait_for_ranks(refs: Sequence[Ref], timeout_s: float) -> list[Ref]:
    """Wait at most ``timeout_s`` for the calls of one invocation; returns those that have neither result nor error."""
    pending, deadline_s = list(refs), time.monotonic() + timeout_s
    while pending:
        outcomes = pending[0].port.wait(pending, max(0.0, deadline_s - time.monotonic()))
        late = [ref for ref, outcome in zip(pending, outcomes, strict=True) if outcome.late]
        if len(late) == len(pending):
            break
        pending = late  # A failed one ends the wait for the others.
    return pending
