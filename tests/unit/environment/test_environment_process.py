# SPDX-License-Identifier: Apache-2.0
"""Environments and other servers in a killable child process."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from test_turns import play

from dlrover.python.rl.common.errors import EnvironmentFailed
from dlrover.python.rl.environment.core.turns import Guard
from dlrover.python.rl.environment.sandbox.child_process import ChildEnded, ChildProcess, pack_call
from dlrover.python.rl.environment.sandbox.environment_process import EnvironmentServer, IsolatedEnvironment
from tests.support import user_environments
from tests.support.async_tests import until
from tests.support.manual_clock import within
from tests.support.processes import is_alive, wait_until_gone


class Owner:
    pass


class Waiting:
    """Is ready, and waits for the end of its parent."""

    def __init__(self, **ready):
        self.ready = ready

    def serve(self, channel):
        channel.receive()


class Slow(Waiting):
    def serve(self, channel):
        while True:
            channel._incoming.raw.read(1000)
            threading.Event().wait(0.01)


class Disconnected(Waiting):
    def serve(self, channel):
        channel.receive()
        os.closerange(3, 1000)
        threading.Event().wait()


def claim_pid(pid):
    return Waiting(pid=pid)


def leave_orphan():
    return Waiting(orphan=subprocess.Popen(["sleep", "987654"], start_new_session=True).pid)


def refuse():
    raise RuntimeError("out of stock")


@pytest.fixture
def start():
    """Starts a child, which ends with the test, and gives its first reply, too."""
    started = []

    def begin(load, *arguments):
        started.append(ChildProcess(Owner, load, list(arguments), None, 1000))
        return started[-1], started[-1].ready.result(timeout=60)

    yield begin
    for child in started:
        child.end()


def test_request_taken_slowly_does_not_block_the_caller(start):
    child, _ = start(Slow)
    with within(5.0), pytest.raises(TimeoutError):
        child.submit("call", bytes(8_000_000)).result(timeout=0.5)


def test_request_to_an_ended_child_fails_with_the_reason(start):
    child, _ = start(Waiting)
    child.end("it was late")
    assert child._connection.fileno() == -1
    with pytest.raises(ChildEnded, match="it was late"):
        child.submit("call", b"too late").result(timeout=1.0)


def test_child_failing_to_load_reports_the_error(start):
    _, reply = start(refuse)
    assert reply["error"] == "raised RuntimeError: out of stock"
    assert "in refuse" in reply["traceback"]


def test_group_claimed_by_a_child_is_not_killed(start):
    other = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    try:
        child, _ = start(claim_pid, other.pid)
        assert child.pid not in (0, other.pid)
        child.end()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
    finally:
        other.kill()
        other.wait()


def test_child_closing_its_connection_is_killed(start):
    child, _ = start(Disconnected)
    with pytest.raises(ChildEnded, match="it closed its connection"):
        child.submit(*pack_call("any")).result(timeout=10.0)
    assert child._process.wait(5.0)


def test_child_ends_with_an_owner_in_a_cycle():
    owner = Owner()
    owner.itself, owner.child = owner, ChildProcess(owner, Waiting, [], None, 1000)
    owner.child.ready.result(timeout=60)
    process = owner.child._process
    del owner
    gc.collect()
    process.wait(10.0)


def test_orphans_of_a_child_end_with_its_shield(start):
    """Kill the shield: a worker of Ray that ends kills the processes it has started."""
    child, reply = start(leave_orphan)
    os.kill(child._process.pid, signal.SIGKILL)
    wait_until_gone(reply["orphan"])


SCRIPT = user_environments.__file__


@pytest.mark.slow
@pytest.mark.feature(98)
async def test_isolated_process_stuck_in_arithmetic_is_replaced():
    guard = Guard(IsolatedEnvironment(SCRIPT, grace_s=0.5), timeout_s=0.5)
    before = await play(guard, ["done"])
    async with asyncio.timeout(10):
        bombed, other = await asyncio.gather(play(guard, ["bomb"]), play(guard, ["nap", "sleep"]))
    guard._timeout_s = 60.0  # a new process has to start
    await asyncio.to_thread(wait_until_gone, before.extra_info["pid"])
    after = await play(guard, ["done"])
    await guard.shutdown()
    assert bombed.failure == "step gave no answer within 0.5 s"
    assert other.failure is not None
    assert (before.done, after.done) == (True, True)
    await asyncio.to_thread(wait_until_gone, after.extra_info["pid"])


async def test_isolated_process_ending_fails_its_calls():
    guard = Guard(IsolatedEnvironment(SCRIPT))
    async with asyncio.timeout(20):
        failed = await asyncio.gather(play(guard, ["nap", "exit"]), play(guard, ["sleep"]))
    after = await play(guard, ["done"])
    await guard.shutdown()
    assert all("the environment's process ended" in episode.failure for episode in failed)
    assert after.done


async def test_isolated_values_not_sendable_are_refused():
    guard = Guard(IsolatedEnvironment(SCRIPT))
    back = await play(guard, ["object"])
    environment = guard._environment
    with pytest.raises(EnvironmentFailed, match="step cannot be sent"):
        await environment.step("s", "a", {"f": lambda: 0})
    await guard.shutdown()
    with pytest.raises(EnvironmentFailed, match="has been shut down"):
        await environment.step("s", "a", {})
    message = "step returned data that cannot be sent: state['extra_info']['lock']: a lock cannot be saved"
    assert message in back.failure


@pytest.mark.slow
async def test_isolated_sync_calls_hanging_block_no_others():
    guard = Guard(IsolatedEnvironment(f"{SCRIPT}:Counting", {"start": 1}), timeout_s=1.0)
    assert guard._open_slots is not None
    *stuck, fine = await asyncio.gather(*(play(guard, ["hang"]) for _ in range(4)), play(guard, ["4", "9"]))
    await guard.shutdown()
    assert [episode.failure for episode in stuck] == ["step gave no answer within 1 s"] * 4
    assert (fine.failure, fine.done, fine.reward) == (None, True, 19.0)


STIFF = """
import os, time
from pathlib import Path

class World:
    def __init__(self, folder):
        self.folder = Path(folder)

    def step(self, state, action, extra_info):
        if float(action):
            (self.folder / f"asleep {extra_info['seed']}").touch()
        time.sleep(float(action))
        return {"next_state": "more", "reward": 1.0, "extra_info": {"pid": os.getpid()}}

    def shutdown(self):
        (self.folder / f"shut down {os.getpid()}").touch()
"""


async def test_isolated_process_of_returned_calls_stays():
    environment = IsolatedEnvironment(SCRIPT)
    child, environment._abandoned = environment._child, 9
    environment._replace_if_idle()
    assert (environment._child, environment._abandoned) == (child, 0)
    await environment.shutdown()


async def test_isolated_process_of_stuck_calls_is_replaced_when_idle(tmp_path):
    (tmp_path / "stiff.py").write_text(STIFF)
    environment = IsolatedEnvironment(f"{tmp_path}/stiff.py:World", {"folder": str(tmp_path)}, grace_s=30.0)
    guard = Guard(environment)
    old = environment._child
    last, *stuck = [await guard.reset("prompt ", {"seed": seed}) for seed in range(16)]
    steps = [asyncio.create_task(guard.step(episode, "60")) for episode in stuck]
    await until(lambda: len(list(tmp_path.glob("asleep*"))) == len(steps))
    for step in steps:
        step.cancel()
    await asyncio.wait(steps)
    await until(lambda: environment._abandoned > 8)
    for episode in stuck:
        await guard.close(episode)
    await guard.step(last, "0")
    assert last.failure is None and environment._child is old
    environment._grace_s = 0.1
    await guard.close(last)
    await asyncio.to_thread(wait_until_gone, old.pid)
    assert [path.name for path in tmp_path.glob("shut*")] == [f"shut down {old.pid}"]
    after = await play(guard, ["0"], seed=16)
    await guard.shutdown()
    assert after.failure is None and after.extra_info["pid"] != last.extra_info["pid"]


WORLDS = """
import asyncio
from pathlib import Path

class Late:
    def __init__(self, folder):
        self.folder = Path(folder)

    async def reset(self, extra_info):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "a state"

    async def step(self, state, action, extra_info):
        raise AssertionError

    async def close(self, extra_info):
        (self.folder / f"given back {extra_info['world']}").touch()

class Early(Late):
    async def reset(self, extra_info):
        extra_info["world"] = 7
        return "a state"
"""


@pytest.fixture
def worlds(tmp_path):
    (tmp_path / "worlds.py").write_text(WORLDS)
    return lambda name: IsolatedEnvironment(f"{tmp_path}/worlds.py:{name}", {"folder": str(tmp_path)}, grace_s=30.0)


async def test_isolated_world_after_the_deadline_is_given_back(worlds, tmp_path):
    guard = Guard(worlds("Late"), timeout_s=0.3)
    episode = await guard.reset("prompt ", {"world": 3})
    assert episode.failure is not None
    await until((tmp_path / "given back 3").exists)
    await guard.shutdown()


async def test_isolated_world_of_a_cancelled_reset_is_given_back(worlds, tmp_path):
    environment = worlds("Early")
    asking = asyncio.ensure_future(environment.reset({}))
    while not environment._child._pending:  # until the request is on its way; this loop takes no answer
        await asyncio.sleep(0)
    while environment._child._pending:
        time.sleep(0.001)
    asking.cancel()
    await until((tmp_path / "given back 7").exists)
    await environment.shutdown()


class StuckWorld:
    started = threading.Event()

    async def step(self, state, action, extra_info):
        self.started.set()
        await asyncio.Event().wait()


def test_isolated_call_cancelled_while_it_runs_is_answered():
    started, answered, answers = StuckWorld.started, threading.Event(), {}

    class Requests:
        """A connection to a parent, which waits for the last request to take effect before it sends the next."""

        requests = iter([(None, ("1", "step", ("", "", {}))), (started, ("2", "cancel", ("1",))), (answered, None)])

        def receive(self):
            effect, request = next(self.requests)
            assert effect is None or effect.wait(20)
            return request

        def send(self, number, reply):
            answers[number] = reply
            if number == "1":
                answered.set()

    EnvironmentServer(f"{__name__}:StuckWorld", {}).serve(Requests())
    assert answers["1"] == {"error": "it was cancelled", "traceback": ""}


def test_dropped_environment_leaves_no_process():
    environment = IsolatedEnvironment(SCRIPT)
    pid = environment._running().pid
    assert is_alive(pid)
    del environment
    wait_until_gone(pid)
