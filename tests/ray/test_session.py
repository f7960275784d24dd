"""Engines driven by hand on a real Ray: processes, slots, ranks, and how they end."""

import contextlib
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from session_toys import EchoEngine, Policy, TwoLayers, start
from two_nodes import descendants, users_of

import dlrover as rl
from dlrover.python.rl.common.errors import InvocationError, InvocationTimeout, SessionError, WorkloadDied
from dlrover.python.rl.recipe.tiny import write_tiny_model

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).tolist()
GREEDY = {"temperature": 0.0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=128)


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


def empty(cls, *args):
    with rl.nn.empty_weights():
        return cls(*args)


# -- slots and processes ----------------------------------------------------------------------------------------------


def test_006_008_engines_fill_the_slots_and_share_them(session):
    with built(rl.InferenceEngine("anything", EchoEngine)) as inference:
        assert inference.groups == ((0,), (1,))
        assert [len(output.outputs) for output in inference.generate(["a", "b", "c"])] == [1, 1, 1]
        with pytest.raises(SessionError, match=r"TRAIN_\d+ asks for 1 x 3 = 3 slots, but colocate_with has 2"):
            rl.TrainEngine(empty(TwoLayers)).build(shards=3, data_parallel_size=1, colocate_with=inference)
        with pytest.raises(SessionError, match="0 free slots are too few"):
            rl.TrainEngine(empty(TwoLayers)).build()
        with built(rl.TrainEngine(empty(TwoLayers)), shards=1, colocate_with=inference) as train:
            assert (train.slots, train.groups, train.replicas) == (inference.slots, ((0,), (1,)), 2)
            assert len({facts["pid"] for facts in train.facts()} | {os.getpid()}) == 3
        assert session.free_slots == 0
    assert session.free_slots == 2


def test_012_engines_that_start_side_by_side_have_ports_of_their_own(session):
    engines = [rl.InferenceEngine("anything", EchoEngine) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda engine: engine.build(data_parallel_size=1), engines))
    try:
        assert len({engine.name for engine in engines}) == 2
        assert len({engine._crew.processes[0].port for engine in engines}) == 2
        assert [engine.generate("a")[0].outputs[0].token_ids for engine in engines] == [[97], [97]]
    finally:
        for engine in engines:
            engine.release()


@pytest.mark.slow
def test_012_twenty_crews_that_start_at_once_have_twenty_ports(session):
    """Each holds something that needs no torch: it is about their processes."""
    names = [f"CROWD_{number}" for number in range(20)]
    try:
        with ThreadPoolExecutor(len(names)) as pool:
            started = list(pool.map(lambda name: session.hosting.start(name, [(0,)], "io:BytesIO"), names))
        assert len({process.port for (process,) in started} - {0}) == 20
        assert len({process.pid for (process,) in started}) == 20
    finally:
        for name in names:
            session.hosting.end(name)


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_025_to_041_two_ranks_work_as_one(session):
    """Every layout's gradients are in ``tests/unit/engine/test_module_engine.py``."""
    module = TwoLayers()
    module.load_state_dict(start())
    module.on_weights_materialized()
    with built(rl.TrainEngine(empty(TwoLayers), name="actor")) as train:
        assert (train.replicas, train.groups) == (2, ((0, 1),))
        # Arguments: copied, split, merged.
        assert [facts["seen"] for facts in train.facts(0.5, "all")] == [[0.5, "all"]] * 2
        assert train.rows(rl.NeedParallel([0, 1, 2])) == [[0, 1], [2]]
        assert train.rows.options(merge="flat")(rl.NeedParallel([0, 1, 2])) == [0, 1, 2]
        # Steps: uneven parts, padding, accumulation.
        for rows in (ROWS[:3], ROWS[:1]):
            module.train_step(rows)
            module.optimizer_step()
            assert len(train.train_step(rl.NeedParallel(rows, pad=True))) == min(len(rows), 2)
            train.optimizer_step()
        for part in (ROWS[:4], ROWS[4:]):
            module.train_step(part, 2)
            train.train_step(rl.NeedParallel(part), 2)
        module.optimizer_step()
        train.optimizer_step()
        found = train.state_dict()
        assert [
            name for name, one in module.state_dict().items() if not torch.allclose(found[name], one, atol=1e-5)
        ] == []
        # Modes and places.
        train.eval()
        assert ([facts["training"] for facts in train.facts()], train.training) == ([False, False], False)
        train.cpu()
        assert (train.footprint(), train.device()) == ([{}, {}], "cpu")
        # Errors.
        with pytest.raises(InvocationError, match=r"in host memory: fail needs cuda\(\) before"):
            train.fail("no luck")
        train.cuda()
        with pytest.raises(InvocationError, match=r"ACTOR\[[01]\]\.fail on \S+: ValueError: no luck") as caught:
            train.fail("no luck")
        assert isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(InvocationError, match="nowhere"):
            train.save("/proc/nowhere")
        assert train.rows(rl.NeedParallel([0, 1])) == [[0], [1]], "a rank still waits for the one that could not write"
        with pytest.raises(InvocationTimeout, match=r"ACTOR\[0\]\.wait: no answer within 0\.5 s from ranks 0, 1"):
            train.wait.options(timeout_s=0.5)(3)


def test_a_call_that_has_failed_on_one_rank_is_over_on_all_before_the_next_begins(session, monkeypatch):
    with built(rl.TrainEngine(empty(TwoLayers), name="torn")) as train:
        with pytest.raises(InvocationError, match="no luck"):
            train.fail_or_wait(rl.NeedParallel([0, 1]))
        assert len(train.facts()) == 2, "it has waited"
        monkeypatch.setattr("dlrover.python.rl.session.engine._SETTLE_S", 0.5)
        with pytest.raises(InvocationError, match="no luck"):
            train.fail_or_wait(rl.NeedParallel([0, 60]))
        with pytest.raises(
            SessionError, match="TORN cannot go on with facts: fail_or_wait has failed, and is not over on ranks 1;"
        ):
            train.facts()


# -- weights ----------------------------------------------------------------------------------------------------------


def bytes_through(session, monkeypatch):
    """Counts the bytes of all that this process puts or fetches from now on."""
    port, seen = session.hosting.port, []
    for name in ("wait", "put"):
        plain = getattr(port, name)

        def counted(*args, plain=plain, name=name):
            result = plain(*args)
            seen.append(len(pickle.dumps([outcome.value for outcome in result] if name == "wait" else args[0])))
            return result

        monkeypatch.setattr(port, name, counted)
    return seen


def test_100_101_colocated_engines_share_memory_and_no_weight_passes_the_script(session, model, monkeypatch, tmp_path):
    prompts = ["12+13=", "hello"]
    with built(rl.InferenceEngine(model)) as inference:
        before = inference.generate(prompts, GREEDY)
        with built(rl.TrainEngine(Policy.from_pretrained(model)), colocate_with=inference) as train:
            for _ in range(3):
                train.train_step(rl.NeedParallel([[49, 50, 43, 49, 51, 61], [104, 101, 108, 108, 111]]))
                train.optimizer_step()
            train.save(tmp_path / "saved")
            seen = bytes_through(session, monkeypatch)
            report = train.p2p_weight_sync(inference)
            size = sum(tensor.numel() for tensor in Policy.from_pretrained(model).parameters()) * 4
            # Names, shapes and fingerprints; nothing that grows with the weights.
            assert sum(seen) < 20_000 < size
            assert (report.way, report.stamp.version) == ("shared memory", 3)
            monkeypatch.undo()
        after = inference.generate(prompts, GREEDY)
    with built(rl.InferenceEngine(tmp_path / "saved"), data_parallel_size=1) as fresh:
        expected = fresh.generate(prompts, GREEDY)
    tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in (before, after, expected)]
    assert tokens[0] != tokens[1] == tokens[2]


# -- failures ---------------------------------------------------------------------------------------------------------


def test_150_a_dead_process_is_named_at_once(session):
    with built(rl.TrainEngine(empty(TwoLayers), name="mortal")) as train:
        victim = train.facts()[1]["pid"]
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(train.wait, 60)
            time.sleep(0.5)  # the call is under way
            os.kill(victim, signal.SIGKILL)
            began_s = time.monotonic()
            with pytest.raises(
                WorkloadDied, match=rf"MORTAL\[1\]\.wait on \S+: its process {victim} is gone"
            ) as caught:
                waiting.result(timeout=30)
        assert time.monotonic() - began_s < 10
        assert (caught.value.rank, caught.value.method) == (1, "wait")
        with pytest.raises(WorkloadDied, match="is gone"):
            train.facts()
    assert session.free_slots == 2


# -- beginning and end ------------------------------------------------------------------------------------------------


def started(code, tmp_path):
    """A script of its own; prints what it has started as JSON lines."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/ray")])
    return subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def gone(pids, timeout_s=20.0):
    deadline_s = time.monotonic() + timeout_s
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline_s:
            return alive
        time.sleep(0.1)
    return []


@pytest.mark.slow
def test_001_init_starts_a_cluster_and_shutdown_leaves_no_process(tmp_path):
    code = """
    import json, os
    import dlrover as rl
    from dlrover.python.rl.runtime.node_memory import memory_path
    from dlrover.python.rl.session.session import MEMORY
    from session_toys import EchoEngine
    from two_nodes import descendants, users_of
    session = rl.init(slots_per_node=3, log_to_driver=False)
    engine = rl.InferenceEngine("anything", EchoEngine).build()
    answers = [output.outputs[0].token_ids for output in engine.generate(["a", "b", "c", "d"])]
    import ray
    folder = ray._private.worker._global_node.get_session_dir_path()
    below = descendants(os.getpid())
    rl.shutdown()
    memory = str(memory_path(MEMORY, session.id))
    print(json.dumps([len(session.slots), answers, below, folder, memory, descendants(os.getpid())]))
    """
    process = started(code, tmp_path)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err[-3000:]
    slots, answers, below, folder, memory, left = json.loads(out.splitlines()[-1])
    assert (slots, answers) == (3, [[97], [98], [99], [100]])
    assert len(below) > 4
    assert gone(below) == []
    assert left == []
    assert not Path(folder).exists()
    assert not Path(memory).exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_023_a_script_that_is_ended_during_a_rollout_leaves_no_process_and_no_port(tmp_path, how):
    began = tmp_path / "began"
    code = f"""
    import json, os, sys
    import dlrover as rl
    from session_toys import EchoEngine
    from two_nodes import descendants
    rl.init(slots_per_node=2, log_to_driver=False)
    engine = rl.InferenceEngine("anything", EchoEngine).build(pause_s=600, began={str(began)!r})
    import ray
    print(json.dumps([ray._private.worker._global_node.get_session_dir_path(), descendants(os.getpid())]), flush=True)
    engine.generate(["a", "b"])
    """
    process = started(code, tmp_path)
    try:
        folder, below = json.loads(process.stdout.readline())
        deadline_s = time.monotonic() + 60
        while not began.exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        if how == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group
        else:
            process.terminate()
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert ("KeyboardInterrupt" in err) == (how == "Ctrl-C")
    assert gone(below) == []
    assert users_of(Path(folder)) == []
    assert not Path(folder).exists()


@pytest.mark.slow
def test_011_slots_of_two_nodes_come_back_twenty_times(tmp_path):
    code = """
    import json
    import dlrover as rl
    from session_toys import EchoEngine
    from two_nodes import two_nodes
    with two_nodes(workers=1, cpus=4, head_cpus=4, connect=False) as nodes:
        with rl.init(nodes.address, slots_per_node=2, log_to_driver=False) as session:
            free = []
            for number in range(20):
                engine = rl.InferenceEngine("anything", EchoEngine).build(data_parallel_size=1 + number % 4)
                answers = len(engine.generate(["a"] * 5))
                engine.release()
                free.append([session.free_slots, answers])
            where = sorted({device.node for device in session.slots})
            engine = rl.InferenceEngine("anything", EchoEngine).build(nodes=[where[1]])
            print(json.dumps([free, len(where), len(engine.slots)]))
    """
    process = started(code, tmp_path)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-3000:]
    assert json.loads(out.splitlines()[-1]) == [[[4, 5]] * 20, 2, 2]


def test_011_nothing_is_left_of_released_engines(session):
    before = set(descendants(os.getpid()))
    for _ in range(2):
        with built(rl.InferenceEngine("anything", EchoEngine), data_parallel_size=1):
            pass
    gc.collect()
    deadline_s = time.monotonic() + 20
    while any("HostedActor" in cmdline(pid) for pid in set(descendants(os.getpid())) - before):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def cmdline(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""
