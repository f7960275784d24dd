# SPDX-License-Identifier: Apache-2.0
"""The watch over the nodes, against a table and connections of the test; no Ray is started."""

import asyncio
import subprocess
import sys
import threading

import pytest

from dlrover.python.rl.runtime.ray.cluster.nodes import NodeRow, NodeWatch, closed, in_daemon_thread

DEADLINE_S = 10.0


class Cluster:
    """A node table, and ports that are open until somebody closes them."""

    def __init__(self, *names):
        self.rows = {name: NodeRow(name, True, name, 1) for name in names}
        self.open = {name: asyncio.Event() for name in names}
        self.refuses = set()
        self.connections = []
        self.reads = 0
        self.lost = asyncio.Queue()

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
        until = self.reads + times
        async with asyncio.timeout(DEADLINE_S):
            while self.reads < until:
                await asyncio.sleep(0)


def watched(test):
    """Run ``test(cluster)`` beside a watch over nodes a and b."""

    async def run():
        cluster = Cluster("a", "b")
        watch = cluster.watch = NodeWatch(cluster.table, cluster.closed)
        task = asyncio.create_task(watch.watch(cluster.lost.put_nowait, interval_s=0.01))
        try:
            await test(cluster)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert cluster.lost.empty()
        assert len(asyncio.all_tasks()) == 1, "connections are still held"

    def test_it():
        asyncio.run(run())

    test_it.__name__ = test.__name__
    return test_it


@watched
async def test_a_port_that_refuses_is_a_lost_node_long_before_the_table_says_so(cluster):
    cluster.kill("a")
    assert await cluster.next_loss() == ("a", "NODE_LOST", "its raylet no longer listens at a:1")
    cluster.bury("a", "missed heartbeats")
    await cluster.reads_more()  # and is not reported again


@watched
async def test_a_dead_row_is_a_lost_node_with_rays_words(cluster):
    cluster.bury("b", "missed\n heartbeats")
    assert await cluster.next_loss() == ("b", "NODE_LOST", "Ray declared it dead: missed heartbeats")
    await cluster.reads_more()


@watched
async def test_a_row_that_is_gone_is_a_lost_node(cluster):
    await cluster.reads_more()
    del cluster.rows["b"]
    assert await cluster.next_loss() == ("b", "NODE_LOST", "Ray no longer knows it")


@watched
async def test_a_connection_that_is_closed_once_is_made_again(cluster):
    await cluster.reads_more()
    cluster.open["a"].set()  # an idle connection that the raylet has had enough of
    async with asyncio.timeout(DEADLINE_S):
        while cluster.connections.count("a") < 2:
            await asyncio.sleep(0.01)
    cluster.kill("a")
    assert (await cluster.next_loss())[0] == "a"


@watched
async def test_a_node_that_is_drained_is_left_before_it_goes(cluster):
    cluster.rows["b"] = NodeRow("b", True, "b", 1, draining=True)
    assert await cluster.next_loss() == ("b", "PREEMPTED", "it will be removed: it is drained")
    cluster.bury("b", "drained")
    await cluster.reads_more()


@watched
async def test_a_node_that_will_go_is_left_only_for_another_one(cluster):
    cluster.rows["b"] = NodeRow("b", True, "b", 1, draining=True)
    await cluster.next_loss()
    cluster.watch.take_notice("a", "it was sent SIGTERM")
    await cluster.reads_more()
    assert cluster.lost.empty()
    cluster.open["c"] = asyncio.Event()
    cluster.rows["c"] = NodeRow("c", True, "c", 1)
    assert await cluster.next_loss() == ("a", "PREEMPTED", "it will be removed: it was sent SIGTERM")


@watched
async def test_a_node_that_joins_later_is_watched_too(cluster):
    cluster.open["c"] = asyncio.Event()
    cluster.rows["c"] = NodeRow("c", True, "c", 1)
    await cluster.reads_more()
    cluster.kill("c")
    assert (await cluster.next_loss())[0] == "c"


def test_one_refusal_or_no_answer_is_no_verdict():
    async def run():
        answers = iter([ConnectionRefusedError(), TimeoutError(), ConnectionRefusedError(), OSError("no route")])
        over = asyncio.Event()

        async def flaky(host, port):
            error = next(answers, None)
            if error is None:
                over.set()
                await asyncio.Event().wait()
            raise error

        lost = []
        watch = NodeWatch(lambda: [NodeRow("a", True, "a", 1)], flaky)
        task = asyncio.create_task(watch.watch(lost.append, interval_s=0.01))
        await asyncio.wait_for(over.wait(), DEADLINE_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert lost == []

    asyncio.run(run())


@pytest.mark.parametrize("fails", [True, False])
def test_a_table_that_fails_or_does_not_come_is_no_verdict_and_is_asked_again(fails):
    async def run():
        ready, calls, found = threading.Event(), [], asyncio.Event()

        def table():
            calls.append(threading.current_thread())
            if len(calls) == 1:
                if fails:
                    raise RuntimeError("the GCS is away")
                ready.wait(timeout=DEADLINE_S)
            return [NodeRow("a", False, "a", 1)]

        watch = NodeWatch(table, table_s=0.01)
        task = asyncio.create_task(watch.watch(lambda *loss: found.set(), interval_s=0.01))
        if not fails:
            async with asyncio.timeout(DEADLINE_S):
                while not calls:
                    await asyncio.sleep(0.01)
            for _ in range(10):
                await asyncio.sleep(0.01)
            assert len(calls) == 1  # one at a time
            assert not found.is_set()
            ready.set()
        await asyncio.wait_for(found.wait(), DEADLINE_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert all(thread.daemon for thread in calls)

    asyncio.run(run())


def test_a_real_connection_is_held_until_the_other_side_closes_it():
    async def run():
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

    asyncio.run(run())


async def test_a_result_and_an_error_come_to_the_loop():
    assert await in_daemon_thread(divmod, 7, 3) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(divmod, 7, 0)


async def test_a_call_that_was_given_up_ends_in_silence():
    ended = threading.Event()
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    future = in_daemon_thread(lambda: ended.wait(10))
    future.cancel()
    ended.set()
    await asyncio.sleep(0.05)
    assert errors == []


def test_a_call_that_does_not_end_does_not_keep_the_process_from_ending():
    code = (
        "import asyncio, time\n"
        "from dlrover.python.rl.runtime.ray.cluster.nodes import in_daemon_thread\n"
        "async def main():\n"
        "    in_daemon_thread(time.sleep, 600)\n"
        "asyncio.run(main())\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
