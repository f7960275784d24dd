# SPDX-License-Identifier: Apache-2.0
"""The watch over the nodes, against a table and connections of the test; no Ray is started."""

import asyncio
import threading
from contextlib import asynccontextmanager, suppress

import pytest

from dlrover.python.rl.runtime.ray.cluster.nodes import NodeRow, NodeWatch, closed, in_daemon_thread
from tests.support.async_tests import until

DEADLINE_S = 10.0


class Cluster:
    """A node table, and ports that are open until the test closes them."""

    def __init__(self, *names):
        self.rows, self.open = {}, {}
        for name in names:
            self.add(name)
        self.refuses, self.connections, self.reads = set(), [], 0
        self.lost = asyncio.Queue()
        self.watch = NodeWatch(self.table, self.closed)

    def add(self, name, **terms):
        self.open.setdefault(name, asyncio.Event())
        self.rows[name] = NodeRow(name, True, name, 1, **terms)

    def table(self):
        self.reads += 1
        return list(self.rows.values())

    async def closed(self, host, port):
        self.connections.append(host)
        if host in self.refuses:
            raise ConnectionRefusedError
        await self.open[host].wait()
        self.open[host].clear()

    def kill(self, name):
        self.refuses.add(name)
        self.open[name].set()

    def bury(self, name, why=""):
        self.rows[name] = NodeRow(name, False, name, 1, why)

    async def next_loss(self):
        """The node of the next loss, the kind of its cause, and why."""
        loss = await asyncio.wait_for(self.lost.get(), DEADLINE_S)
        return loss.node, loss.cause.kind.name, loss.cause.message.removeprefix(f"the node {loss.node} is lost: ")

    async def reads_more(self, times=3):
        last = self.reads + times
        await until(lambda: self.reads >= last)


@asynccontextmanager
async def watching(watch, report):
    task = asyncio.create_task(watch.watch(report, interval_s=0.01))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def watched():
    """A cluster of nodes a and b that is watched; each of its losses is to be taken."""
    cluster = Cluster("a", "b")
    async with watching(cluster.watch, cluster.lost.put_nowait):
        yield cluster
    assert cluster.lost.empty()
    assert len(asyncio.all_tasks()) == 1, "connections are still held"


async def test_port_with_refusals_is_a_lost_node():
    async with watched() as cluster:
        cluster.kill("a")
        assert await cluster.next_loss() == ("a", "NODE_LOST", "its raylet no longer listens at a:1")
        cluster.bury("a", "missed heartbeats")
        await cluster.reads_more()  # and is not reported again


async def test_dead_or_missing_row_is_a_lost_node():
    async with watched() as cluster:
        cluster.bury("b", "missed\n heartbeats")
        assert await cluster.next_loss() == ("b", "NODE_LOST", "Ray declared it dead: missed heartbeats")
        await cluster.reads_more()
        del cluster.rows["a"]
        assert await cluster.next_loss() == ("a", "NODE_LOST", "Ray no longer knows it")


async def test_connection_closed_once_is_made_again():
    async with watched() as cluster:
        await cluster.reads_more()
        cluster.open["a"].set()  # an idle connection that the raylet has had enough of
        await until(lambda: cluster.connections.count("a") >= 2)
        cluster.kill("a")
        assert (await cluster.next_loss())[0] == "a"


async def test_drained_node_is_left_before_it_goes():
    async with watched() as cluster:
        cluster.add("b", draining=True)
        assert await cluster.next_loss() == ("b", "PREEMPTED", "it will be removed: it is drained")
        cluster.bury("b", "drained")
        await cluster.reads_more()


async def test_departing_node_is_left_only_for_another():
    async with watched() as cluster:
        cluster.add("b", draining=True)
        await cluster.next_loss()
        cluster.watch.take_notice("a", "it was sent SIGTERM")
        await cluster.reads_more()
        assert cluster.lost.empty()
        cluster.add("c")
        assert await cluster.next_loss() == ("a", "PREEMPTED", "it will be removed: it was sent SIGTERM")


async def test_later_node_is_watched():
    async with watched() as cluster:
        cluster.add("c")
        await cluster.reads_more()
        cluster.kill("c")
        assert (await cluster.next_loss())[0] == "c"


async def test_one_refusal_or_no_answer_is_no_loss():
    answers = iter([ConnectionRefusedError(), TimeoutError(), ConnectionRefusedError(), OSError("no route")])
    over, lost = asyncio.Event(), []

    async def flaky(host, port):
        error = next(answers, None)
        if error is None:
            over.set()
            await asyncio.Event().wait()
        raise error

    async with watching(NodeWatch(lambda: [NodeRow("a", True, "a", 1)], flaky), lost.append):
        await asyncio.wait_for(over.wait(), DEADLINE_S)
    assert lost == []


@pytest.mark.parametrize("fails", [True, False])
async def test_failed_or_hung_table_is_read_again(fails):
    ready, threads, losses = threading.Event(), [], []

    def table():
        threads.append(threading.current_thread())
        if len(threads) == 1:
            if fails:
                raise RuntimeError("the GCS is away")
            ready.wait(timeout=DEADLINE_S)
        return [NodeRow("a", False, "a", 1)]

    async with watching(NodeWatch(table, table_s=0.01), losses.append):
        if not fails:
            await until(lambda: threads)
            await asyncio.sleep(0.1)
            assert (len(threads), losses) == (1, [])  # one at a time
            ready.set()
        await until(lambda: losses)
    assert all(thread.daemon for thread in threads)


async def test_connection_is_held_until_the_other_side_closes_it():
    served = asyncio.get_running_loop().create_future()

    async def serve(reader, writer):
        writer.write(b"hello")
        served.set_result(writer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        waiting = asyncio.create_task(closed("127.0.0.1", port))
        writer = await asyncio.wait_for(served, DEADLINE_S)
        assert not waiting.done()
        writer.close()
        await asyncio.wait_for(waiting, DEADLINE_S)
    with pytest.raises(ConnectionRefusedError):
        await closed("127.0.0.1", port)


async def test_in_daemon_thread_cancelled_ends_in_silence():
    ended, errors = threading.Event(), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    in_daemon_thread(lambda: ended.wait(10)).cancel()
    ended.set()
    await asyncio.sleep(0.05)
    assert errors == []
