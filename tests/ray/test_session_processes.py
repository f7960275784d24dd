# SPDX-License-Identifier: Apache-2.0
"""Engines driven by hand on a real Ray: their slots and processes, how they begin and end."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dlrover.rl as rl
from dlrover.python.rl.common.errors import SessionError
from tests.ray.two_nodes import users_of
from tests.support.commands import environment, processes_below, wait_for
from tests.support.session_toys import EchoEngine, TwoLayers, empty

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def session(ray_session):
    with rl.init(slots_per_node=2, log_to_driver=False) as session:
        yield session
        assert session.free_slots == 2, repr(session)


@contextlib.contextmanager
def built(engine, **options):
    engine.build(**options)
    try:
        yield engine
    finally:
        engine.release()


@pytest.mark.feature(6, 8)
def test_engines_fill_the_slots_and_share_them(session):
    with built(rl.InferenceEngine("anything", EchoEngine)) as inference:
        assert inference.groups == ((0,), (1,))
        assert [len(output.outputs) for output in inference.generate(["a", "b", "c"])] == [1, 1, 1]
        with pytest.raises(SessionError, match=r"TRAIN_\d+ requests 1 x 3 = 3 slots, but colocate_with has 2"):
            rl.TrainEngine(empty(TwoLayers)).build(data_parallel_size=3, colocate_with=inference)
        with pytest.raises(SessionError, match="0 free slots are too few"):
            rl.TrainEngine(empty(TwoLayers)).build()
        with built(rl.TrainEngine(empty(TwoLayers)), shards=1, colocate_with=inference) as train:
            assert (train.slots, train.groups, train.replicas) == (inference.slots, ((0,), (1,)), 2)
            assert len({facts["pid"] for facts in train.facts()} | {os.getpid()}) == 3
        assert session.free_slots == 0
    assert session.free_slots == 2


@pytest.mark.feature(12)
def test_twenty_crews_started_at_once_have_twenty_ports(session):
    """Each holds something that needs no torch: it is about their processes."""
    names = [f"CROWD_{number}" for number in range(20)]
    workload = "dlrover.python.rl.trainer.workload:BaseWorkload"
    try:
        with ThreadPoolExecutor(len(names)) as pool:
            started = list(pool.map(lambda name: session.hosting.start(name, [(0,)], workload), names))
        assert len({process.port for (process,) in started} - {0}) == 20
        assert len({process.pid for (process,) in started}) == 20
    finally:
        for name in names:
            session.hosting.end(name)


def started(code, tmp_path):
    """A separate script, which prints what it has started as JSON lines."""
    script = tmp_path / "script.py"
    script.write_text("import json, os\nimport dlrover.rl as rl\n" + textwrap.dedent(code), encoding="utf-8")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(script)], env=environment(), start_new_session=True, **pipes)


def printed(code, tmp_path):
    """Return what a script has printed as JSON."""
    process = started(code, tmp_path)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def wait_until_gone(pids):
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)


@pytest.mark.feature(1)
def test_init_starts_a_cluster_and_shutdown_leaves_no_process(tmp_path):
    code = """
    from tests.support.session_toys import EchoEngine
    from tests.support.commands import processes_below
    session = rl.init(slots_per_node=3, log_to_driver=False)
    engine = rl.InferenceEngine("anything", EchoEngine).build()
    answers = [output.outputs[0].token_ids for output in engine.generate(["a", "b", "c", "d"])]
    import ray
    folder = ray._private.worker._global_node.get_session_dir_path()
    below = list(processes_below(os.getpid()))
    rl.shutdown()
    print(json.dumps([len(session.slots), answers, below, folder, list(processes_below(os.getpid()))]))
    """
    slots, answers, below, folder, left = printed(code, tmp_path)
    assert (slots, answers) == (3, [[97], [98], [99], [100]])
    assert len(below) > 4
    wait_until_gone(below)
    assert left == []
    assert not Path(folder).exists()


def test_session_on_gpus_has_their_names_and_returns_them(tmp_path):
    code = """
    import ray
    ray.init(num_cpus=1, num_gpus=2, include_dashboard=False)
    session = rl.init(log_to_driver=False)
    devices = [[device.kind, device.name] for device in session.slots]
    before = ray.available_resources().get("GPU", 0)
    rl.shutdown()
    states = sorted({row["state"] for row in ray.util.placement_group_table().values()})
    print(json.dumps([devices, before, states]))
    """
    assert printed(code, tmp_path) == [[["cuda", "0"], ["cuda", "1"]], 0, ["REMOVED"]]


@pytest.mark.feature(23)
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_script_ended_during_a_rollout_leaves_nothing(tmp_path, how):
    began = tmp_path / "began"
    code = f"""
    from tests.support.session_toys import EchoEngine
    from tests.support.commands import processes_below
    rl.init(slots_per_node=2, log_to_driver=False)
    engine = rl.InferenceEngine("anything", EchoEngine).build(pause_s=600, began={str(began)!r})
    import ray
    folder = ray._private.worker._global_node.get_session_dir_path()
    print(json.dumps([folder, list(processes_below(os.getpid()))]), flush=True)
    engine.generate(["a", "b"])
    """
    process = started(code, tmp_path)
    try:
        folder, below = json.loads(process.stdout.readline())
        wait_for(began.exists, 60)
        if how == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group
        else:
            process.terminate()
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert ("KeyboardInterrupt" in err) == (how == "Ctrl-C")
    wait_until_gone(below)
    assert users_of(Path(folder)) == []
    assert not Path(folder).exists()


@pytest.mark.feature(11)
def test_slots_of_two_nodes_come_back_twenty_times(tmp_path):
    code = """
    from tests.support.session_toys import EchoEngine
    from tests.ray.two_nodes import two_nodes
    with two_nodes(workers=1, cpus=4, head_cpus=4, connect=False) as nodes:
        with rl.init(nodes.address, slots_per_node=2, log_to_driver=False) as session:
            free = []
            for number in range(20):
                size = 4 if number % 10 == 9 else 1  # each process imports torch: few of them, or it takes minutes
                engine = rl.InferenceEngine("anything", EchoEngine).build(data_parallel_size=size)
                answers = len(engine.generate(["a"] * 5))
                engine.release()
                free.append([session.free_slots, answers])
            where = sorted({device.node for device in session.slots})
            engine = rl.InferenceEngine("anything", EchoEngine).build(nodes=[where[1]])
            print(json.dumps([free, len(where), len(engine.slots)]))
    """
    assert printed(code, tmp_path) == [[[4, 5]] * 20, 2, 2]


@pytest.mark.feature(11)
def test_released_engines_leave_no_process(session):
    before = processes_below(os.getpid())
    for _ in range(2):
        with built(rl.InferenceEngine("anything", EchoEngine), data_parallel_size=1):
            pass
    gc.collect()

    def new_actors():
        lines = processes_below(os.getpid())
        return [pid for pid in lines.keys() - before.keys() if "HostedActor" in lines[pid]]

    wait_for(lambda: not new_actors(), 20)
