# SPDX-License-Identifier: Apache-2.0
"""Engines driven by hand on a real Ray, two ranks and a receiver that all tests here share."""

import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import dlrover.rl as rl
from dlrover.python.rl.common.errors import InvocationError, InvocationTimeout, SessionError, WorkloadDied
from tests.support.session_toys import EchoEngine, Heavy, start

pytestmark = pytest.mark.ray

ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def session(ray_session):
    with rl.init(slots_per_node=3, log_to_driver=False) as session:
        yield session


@pytest.fixture(scope="module")
def train(session):
    with rl.nn.empty_weights():
        module = Heavy()
    return rl.TrainEngine(module, name="actor").build(data_parallel_size=2)


@pytest.fixture(scope="module")
def inference(session, train):
    return rl.InferenceEngine("anything", EchoEngine).build(not_colocate_with=train)


@pytest.mark.feature(25, 41)
def test_two_ranks_work_as_one(train):
    """Every layout's gradients are in ``tests/unit/engine/test_module_engine.py``."""
    module = Heavy()
    module.load_state_dict(start(), strict=False)
    module.on_weights_materialized()
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
    state = train.state_dict()
    assert [name for name, one in module.state_dict().items() if not torch.allclose(state[name], one, atol=1e-5)] == []
    # Modes and places.
    train.eval()
    assert ([facts["training"] for facts in train.facts()], train.training) == ([False, False], False)
    train.cpu()
    assert (train.footprint(), train.device()) == ([{}, {}], "cpu")
    # Errors.
    with pytest.raises(InvocationError, match=r"in host memory: call cuda\(\) before fail"):
        train.fail("no luck")
    train.cuda()
    with pytest.raises(InvocationError, match=r"ACTOR\[[01]\]\.fail on \S+: ValueError: no luck") as caught:
        train.fail("no luck")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(InvocationError, match=r"ValueError: half of an emoji: \?"):  # Ray ends a process that raises it
        train.fail("half of an emoji: \ud83d")
    with pytest.raises(InvocationError, match="nowhere"):
        train.save("/proc/nowhere")
    assert train.rows(rl.NeedParallel([0, 1])) == [[0], [1]], "a rank still waits for the one that could not write"
    with pytest.raises(InvocationTimeout, match=r"ACTOR\[0\]\.wait: no answer within 0\.5 s from ranks 0, 1"):
        train.wait.options(timeout_s=0.5)(3)


@pytest.mark.slow
def test_call_failed_on_one_rank_ends_before_the_next_begins(train, monkeypatch):
    with pytest.raises(InvocationError, match="no luck"):
        train.fail_or_wait(rl.NeedParallel([0, 4]))
    with monkeypatch.context() as patch:
        patch.setattr("dlrover.python.rl.session.engine._SETTLE_S", 0.2)
        message = "ACTOR cannot call facts: fail_or_wait has failed, and still runs on ranks 1;"
        with pytest.raises(SessionError, match=message):
            train.facts()
    assert len(train.facts()) == 2, "it has waited"


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


@pytest.mark.feature(101, 102)
@pytest.mark.parametrize("way", ["shared memory", "device memory", "broadcast"])
def test_weights_pass_by_the_chosen_way_not_the_script(session, train, inference, monkeypatch, way):
    """Through the script pass names, shapes and fingerprints: nothing that grows with the weights."""
    seen = bytes_through(session, monkeypatch)
    chosen = {} if way == "shared memory" else {"way": way}
    report = train.p2p_weight_sync(inference, **chosen)
    assert sum(seen) < 20_000 < 4 * len(Heavy().ballast)
    assert (report.way, report.stamp.version) == (way, 3)
    (output,) = inference.generate("ab")
    assert (output.outputs[0].token_ids, output.outputs[0].version) == ([97, 98], 3)
    again = train.p2p_weight_sync(inference).stamp
    assert (again == report.stamp) == (way != "device memory"), "that way has other fingerprints"


@pytest.mark.feature(150)
def test_zz_dead_process_is_named_at_once(session, train):
    """The last one: it ends the engine."""
    victim = train.facts()[1]["pid"]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(train.wait, 60)
        time.sleep(0.5)  # the call is under way
        os.kill(victim, signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(WorkloadDied, match=rf"ACTOR\[1\]\.wait on \S+: its process {victim} is gone") as caught:
            waiting.result(timeout=60)
    assert time.monotonic() - began_s < 30
    assert (caught.value.rank, caught.value.method) == (1, "wait")
    with pytest.raises(WorkloadDied, match="is gone"):
        train.facts()
    train.release()
    assert session.free_slots == 2
