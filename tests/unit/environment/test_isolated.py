# SPDX-License-Identifier: Apache-2.0
"""Environments in a process of their own."""

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import EnvironmentFailed
from dlrover.python.rl.environment.core.turns import Guard
from dlrover.python.rl.environment.sandbox.environment_process import EnvironmentServer, IsolatedEnvironment
from tests.support import user_environments

SCRIPT = user_environments.__file__


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 90))


async def play(guard, actions, **info):
    episode = await guard.reset("prompt ", info)
    for action in actions:
        if episode.state is None:
            break
        await guard.step(episode, action)
    await guard.close(episode)
    return episode


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone, or just going
        return False


def wait_until_gone(pid, limit_s=15.0):
    deadline = time.monotonic() + limit_s
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} outlived its owner"
        os.sched_yield()


@pytest.mark.slow
@pytest.mark.feature(98)
def test_arithmetic_that_holds_the_interpreter_costs_its_deadline_and_the_next_sample_finds_a_new_process():
    async def bombed():
        guard = Guard(IsolatedEnvironment(SCRIPT, grace_s=0.5), timeout_s=0.5)
        before = await play(guard, ["done"])
        began = time.monotonic()
        bombed, beside = await asyncio.gather(play(guard, ["bomb"]), play(guard, ["nap", "sleep"]))
        failed_s = time.monotonic() - began
        guard._timeout_s = 60.0  # A new process has to start, once the old one has ended.
        await asyncio.to_thread(wait_until_gone, before.extra_info["pid"])
        after = await play(guard, ["done"])
        await guard.shutdown()
        return before, bombed, beside, failed_s, after

    before, bombed, beside, failed_s, after = run(bombed())
    assert bombed.failure == "step gave no answer within 0.5 s"
    assert beside.failure is not None
    assert failed_s < 10
    assert (before.done, after.done) == (True, True)
    old, new = before.extra_info["pid"], after.extra_info["pid"]
    assert old != new
    wait_until_gone(old)
    wait_until_gone(new)


def test_a_process_that_ends_fails_the_calls_it_is_in_at_once():
    async def ended():
        guard = Guard(IsolatedEnvironment(SCRIPT))
        began = time.monotonic()
        ended, beside = await asyncio.gather(play(guard, ["nap", "exit"]), play(guard, ["sleep"]))
        took_s = time.monotonic() - began
        after = await play(guard, ["done"])
        await guard.shutdown()
        return ended, beside, took_s, after

    ended, beside, took_s, after = run(ended())
    assert "the environment's process ended" in ended.failure
    assert "the environment's process ended" in beside.failure
    assert took_s < 20
    assert after.done


def test_what_cannot_travel_is_told():
    async def sent():
        guard = Guard(IsolatedEnvironment(SCRIPT))
        back = await play(guard, ["object"])
        environment = guard._environment
        with pytest.raises(EnvironmentFailed, match="step cannot be sent"):
            await environment.step("s", "a", {"f": lambda: 0})
        await guard.shutdown()
        with pytest.raises(EnvironmentFailed, match="has been shut down"):
            await environment.step("s", "a", {})
        return back

    assert (
        "step returned data that cannot be sent: state['extra_info']['lock']: a lock cannot be saved"
        in run(sent()).failure
    )


def test_what_cannot_be_loaded_is_told_and_leaves_no_process():
    with pytest.raises(EnvironmentFailed, match="has no 'Countin'; did you mean 'Counting'"):
        IsolatedEnvironment(f"{SCRIPT}:Countin")


def test_an_environment_that_is_dropped_leaves_no_process():
    environment = IsolatedEnvironment(SCRIPT)
    pid = environment._running().pid
    assert is_alive(pid)
    del environment
    wait_until_gone(pid)


@pytest.mark.slow
def test_sync_calls_that_hang_take_no_others_place():
    async def hung():
        guard = Guard(IsolatedEnvironment(f"{SCRIPT}:Counting", {"start": 1}), timeout_s=1.0)
        assert guard._open_slots is not None
        episodes = await asyncio.gather(*(play(guard, ["hang"]) for _ in range(4)), play(guard, ["4", "9"]))
        await guard.shutdown()
        return episodes

    *stuck, fine = run(hung())
    assert [episode.failure for episode in stuck] == ["step gave no answer within 1 s"] * 4
    assert (fine.failure, fine.done, fine.reward) == (None, True, 19.0)


STIFF = """
import os
import time
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


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_process_whose_late_calls_have_returned_stays():
    environment = IsolatedEnvironment(SCRIPT)
    child, environment._abandoned = environment._child, 9
    environment._replace_if_idle()
    assert (environment._child, environment._abandoned) == (child, 0)
    run(environment.shutdown())


def test_isolated_process_of_stuck_calls_is_replaced_when_idle(tmp_path):
    (tmp_path / "stiff.py").write_text(STIFF)

    async def replaced():
        environment = IsolatedEnvironment(f"{tmp_path}/stiff.py:World", {"folder": str(tmp_path)}, grace_s=30.0)
        guard = Guard(environment)
        old, *episodes = environment._child, *[await guard.reset("prompt ", {"seed": seed}) for seed in range(16)]
        last, *stuck = episodes
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
        return last.extra_info["pid"], after

    pid, after = run(replaced())
    assert after.failure is None and after.extra_info["pid"] != pid


STUBBORN = """
import asyncio
from pathlib import Path


class World:
    \"\"\"Finds its world only after its caller has given up.\"\"\"

    def __init__(self, folder):
        self.folder = Path(folder)

    async def reset(self, extra_info):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
        (self.folder / "taken").touch()
        return "a state"

    async def step(self, state, action, extra_info):
        raise AssertionError

    async def close(self, extra_info):
        (self.folder / "taken").rename(self.folder / "given back")
"""


def test_a_world_that_comes_when_its_sample_has_failed_is_given_back(tmp_path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)

    async def abandoned():
        environment = IsolatedEnvironment(f"{tmp_path}/stubborn.py:World", {"folder": str(tmp_path)}, grace_s=30.0)
        guard = Guard(environment, timeout_s=0.3)
        episode = await guard.reset("prompt ", {})
        assert episode.failure is not None
        await wait_for_file(tmp_path / "given back")
        await guard.shutdown()

    run(abandoned())


async def wait_for_file(path):
    async with asyncio.timeout(30):
        while not path.exists():
            await asyncio.sleep(0.01)


READY_AT_ONCE = """
from pathlib import Path


class World:
    def __init__(self, folder):
        self.folder = Path(folder)

    async def reset(self, extra_info):
        extra_info["world"] = 7
        (self.folder / "taken").touch()
        return "a state"

    async def step(self, state, action, extra_info):
        raise AssertionError

    async def close(self, extra_info):
        (self.folder / f"given back {extra_info['world']}").touch()
"""


def test_world_whose_answer_was_on_its_way_is_given_back_too(tmp_path):
    (tmp_path / "ready.py").write_text(READY_AT_ONCE)

    async def abandoned():
        environment = IsolatedEnvironment(f"{tmp_path}/ready.py:World", {"folder": str(tmp_path)})
        asking = asyncio.ensure_future(environment.reset({}))
        while not environment._child._pending:  # until the request is on its way; this loop takes no answer
            await asyncio.sleep(0)
        while environment._child._pending:
            time.sleep(0.001)
        asking.cancel()
        await wait_for_file(tmp_path / "given back 7")
        await environment.shutdown()

    run(abandoned())


class StuckWorld:
    begun = threading.Event()

    async def step(self, state, action, extra_info):
        self.begun.set()
        await asyncio.Event().wait()


def test_a_call_that_is_cancelled_while_it_runs_is_answered():
    begun, answered, answers = StuckWorld.begun, threading.Event(), {}

    class Requests:
        """A connection to a parent, which waits for the last request to take effect before it sends the next."""

        requests = iter([(None, ("1", "step", ("", "", {}))), (begun, ("2", "cancel", ("1",))), (answered, None)])

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
