# SPDX-License-Identifier: Apache-2.0
"""Fast detection of lost nodes.

::

    Ray's node table, every interval ------------ dead or draining there ------------.
    one open connection to each raylet -- closed --> again: refused twice in a row --+--> lost(NodeLost), once

A killed raylet (Ray's process on a node) closes its connections at once; Ray itself needs seconds to notice. A stopped
or unreachable raylet keeps them: Ray's health check detects it, on our own cluster within 4.5 s (``HEALTH``). A node
that is drained, or whose processes were notified of its end as on spot nodes, is left at once if there is another one.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.control.events import Cause, CauseKind, NodeLost
from dlrover.python.rl.runtime.member.heartbeat import OomKills

_LOG = get_logger(__name__)

_CONNECT_S = 2.0
_RETRY_S = 0.1
_REFUSALS = 2


@dataclass(frozen=True)
class NodeRow:
    """A row of Ray's node table: the raylet's address (port 0: unknown), and ``why`` the node died. A ``draining`` node
    is alive."""

    node_id: str
    alive: bool
    host: str
    port: int
    why: str = ""
    draining: bool = False


def node_table() -> list[NodeRow]:
    """List every node that Ray knows, also dead ones. Waits while the GCS is away."""
    draining = ray._private.worker.global_worker.gcs_client.get_draining_nodes(timeout=_CONNECT_S)
    return [
        NodeRow(
            node_id=row["NodeID"],
            alive=bool(row["Alive"]),
            host=row.get("NodeManagerAddress", ""),
            port=int(row.get("NodeManagerPort", 0) or 0),
            why=str(row.get("DeathReasonMessage") or ""),
            draining=row["NodeID"] in draining,
        )
        for row in ray.nodes()
    ]


async def closed(host: str, port: int) -> None:
    """Connect and wait until the other side closes. Raises OSError (ConnectionRefusedError), TimeoutError."""
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await asyncio.open_connection(host, port)
    try:
        while await reader.read(4096):  # waits: for as long as the node lives
            pass
    except ConnectionError:
        pass  # a reset is a close
    finally:
        writer.close()


class NodeWatch:
    """Reports each lost node once. A thread reads ``table``, and waits up to ``table_s`` while the GCS is away."""

    def __init__(
        self,
        table: Callable[[], list[NodeRow]] = node_table,
        closed: Callable[[str, int], Awaitable[None]] = closed,
        table_s: float = 5.0,
    ) -> None:
        self._table, self._closed, self._table_s = table, closed, table_s
        self._request: asyncio.Future[list[NodeRow]] | None = None
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._lost: set[str] = set()
        self._notices: dict[str, str] = {}
        self.oom_kills = OomKills()

    def take_notice(self, node_id: str, why: str) -> None:
        """Record the notice of a process that its node will be removed."""
        if node_id not in self._notices:
            _LOG.warning("the node %s will be removed: %s", node_id[:8], why)
        self._notices.setdefault(node_id, why)

    async def watch(self, lost: Callable[[NodeLost], None], interval_s: float = 0.25) -> None:
        """Watch until cancelled, and read the table every ``interval_s``. Calls ``lost`` in this event loop once for
        each node, also for nodes that were dead before, were shut down cleanly, or will be removed."""

        def report(node_id: str, why: str, kind: CauseKind = CauseKind.NODE_LOST) -> None:
            if node_id not in self._lost:
                self._lost.add(node_id)
                lost(NodeLost(node_id, Cause(kind, "job", f"the node {node_id[:8]} is lost: {why}")))

        try:
            while True:
                self._update(await self._read_rows(), report)
                await asyncio.sleep(interval_s)
        finally:
            for task in self._watches.values():
                task.cancel()
            await asyncio.gather(*self._watches.values(), return_exceptions=True)
            self._watches.clear()

    async def _read_rows(self) -> list[NodeRow] | None:
        self._request = self._request or in_daemon_thread(self._table)
        done, _ = await asyncio.wait([self._request], timeout=self._table_s)
        if not done:
            return None
        request, self._request = self._request, None
        if (error := request.exception()) is not None:
            _LOG.warning("Ray's node table could not be read: %s", error)
            return None
        return request.result()  # waits: not at all, it is done

    def _update(self, rows: list[NodeRow] | None, report: Callable[..., None]) -> None:
        if rows is None:
            return
        alive = {row.node_id for row in rows if row.alive}
        leaving = {row.node_id: "it is drained" for row in rows if row.draining} | self._notices
        is_refuge = bool(alive - leaving.keys())
        for row in rows:
            if not row.alive:
                report(row.node_id, ": ".join(filter(None, ("Ray declared it dead", " ".join(row.why.split())))))
            elif row.node_id in leaving and is_refuge:
                report(row.node_id, f"it will be removed: {leaving[row.node_id]}", CauseKind.PREEMPTED)
            elif row.port and row.node_id not in self._watches and row.node_id not in self._lost:
                self._watches[row.node_id] = asyncio.create_task(self._watch_raylet(row, report))
        for node_id in self._watches.keys() - alive:
            self._watches.pop(node_id).cancel()
            report(node_id, "Ray no longer knows it")

    async def _watch_raylet(self, row: NodeRow, report: Callable[..., None]) -> None:
        """Keep a connection to a raylet open until its port refuses a new one."""
        refused = 0
        while refused < _REFUSALS:
            try:
                await self._closed(row.host, row.port)
                refused = 0
            except ConnectionRefusedError:
                refused += 1
            except (OSError, TimeoutError):
                refused = 0  # slow or unreachable: Ray's health check decides
            if refused < _REFUSALS:
                await asyncio.sleep(_RETRY_S)
        report(row.node_id, f"its raylet no longer listens at {row.host}:{row.port}")


T = TypeVar("T")


def in_daemon_thread(call: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
    """Return the result of a call in a separate thread, which continues when the future is cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(act: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            act(outcome)

    def run() -> None:
        act: Callable[[Any], None] = future.set_result
        outcome: Any
        try:
            outcome = call(*arguments)
        except BaseException as error:  # noqa: BLE001 - handed over to the waiting loop
            act, outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended in the meantime
            loop.call_soon_threadsafe(settle, act, outcome)

    threading.Thread(target=run, name=getattr(call, "__name__", "call"), daemon=True).start()
    return future
