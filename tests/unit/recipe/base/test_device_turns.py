# SPDX-License-Identifier: Apache-2.0
"""Roles on one device, here a simulated one: each has it for its own calls, and the run is the same to the bit."""

from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import InvocationError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.memory.device_lock import DeviceLock
from dlrover.python.rl.engine.memory.device_memory import MemoryLedger
from dlrover.python.rl.engine.model.loading import fingerprint_files
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from dlrover.python.rl.engine.weight_sync.cuda_ipc import CudaIpcTransport
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from dlrover.python.rl.recipe.base.engine_workload import physical_device
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.online import collector
from dlrover.python.rl.recipe.workloads import ActorWorkload, ReferenceWorkload, RewardWorkload, RolloutWorkload
from tests.chaos.job import tiny_job
from tests.support.durable_toys import kill
from tests.support.recipe_stage import Stage

SHARING = ("ACTOR", "ROLLOUT", "REFERENCE")
TOGETHER = ",".join(SHARING)


class TurnActor(ActorWorkload):
    takes_turns = True


class TurnRollout(RolloutWorkload):
    takes_turns = True


class TurnReference(ReferenceWorkload):
    takes_turns = True


APART, IN_TURN = (ActorWorkload, RolloutWorkload, ReferenceWorkload), (TurnActor, TurnRollout, TurnReference)


def stage(folder, classes=IN_TURN, collocation=TOGETHER, offload=True, weight_sync="auto", **rollout):
    roles = {role: (workload, 1) for role, workload in zip(SHARING, classes, strict=True)}
    small = {"samples_per_prompt": 4, "max_new_tokens": 3, **rollout}
    config = tiny_job(folder, 2, reference=True, rollout=small, prompts_per_step=4).config
    config.engine.offload, config.engine.weight_sync = offload, weight_sync
    return Stage(folder / "out", GRPOTrainer, {**roles, "REWARD": (RewardWorkload, 1)}, config, collocation)


def end_of(job, faults=None):
    job.run(faults)
    return (job.folder / "samples.jsonl").read_bytes(), (job.folder / "model/model.safetensors").read_bytes()


def is_held(job, role):
    return [lock.is_held for lock in job.workload(role)._device_locks]


@pytest.fixture(autouse=True)
def _locks_of_this_test(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return end_of(stage(tmp_path_factory.mktemp("undisturbed"), APART, ""))


@pytest.mark.feature(17)
@pytest.mark.parametrize("dies", [False, True])
def test_collocated_roles_in_turn_end_the_same(tmp_path, undisturbed, monkeypatch, dies):
    job = stage(tmp_path)
    together, publish, submit = [], MemoryLedger.publish, job.port.submit

    def locks_and_memories():
        locks = [lock for role in SHARING for lock in getattr(job.workload(role), "_device_locks", ())]
        return [(lock, lock._memory) for lock in locks]

    def record(ledger, owners):
        together.append(sum(memory.total() for _, memory in locks_and_memories()))
        publish(ledger, owners)

    def checked(role, rank, call):
        ref = submit(role, rank, call)
        for lock, memory in locks_and_memories():
            assert memory.total() == 0 or (lock.is_held and lock.owner == "ROLLOUT[0]"), call.method
        return ref

    def gathering(engine, dtype=None):
        locks_held.append(is_held(job, "ACTOR"))
        return gather(engine, dtype)

    def receiving(transport, ticket):
        locks_held.append(is_held(job, "ROLLOUT"))
        return receive(transport, ticket)

    gather, receive, locks_held = Fsdp2TrainEngine.named_weights, PullTransport.receive, []
    monkeypatch.setattr(Fsdp2TrainEngine, "named_weights", gathering)
    monkeypatch.setattr(PullTransport, "receive", receiving)
    monkeypatch.setattr(MemoryLedger, "publish", record)
    job.port.submit = checked
    faults = {(30, "before"): kill("ACTOR", 0), (30, "after"): kill("ROLLOUT", 0)} if dies else None
    assert end_of(job, faults) == undisturbed
    assert len(locks_held) > 4 and all(held_now == [True] for held_now in locks_held)
    peaks = [memory.peak for _, memory in locks_and_memories()]
    assert len(peaks) == len(SHARING)
    assert 0 < max(together) <= max(peaks) < sum(peaks)
    assert list((tmp_path / "dlrover-rl" / "job-run1" / "devices" / "cpu-0").glob("*.wait")) == []


@pytest.mark.parametrize(("weight_sync", "dies"), [("pull", False), ("cuda_ipc", False), ("cuda_ipc", True)])
def test_engines_with_room_for_all_stay_and_end_the_same(tmp_path, undisturbed, monkeypatch, weight_sync, dies):
    job = stage(tmp_path, offload=False, weight_sync=weight_sync)
    moves, holders = [], []

    def moving(cls, name):
        move = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda engine, *part: (moves.append(name), move(engine, *part)))

    def acquiring(lock, timeout_s):
        acquire(lock, timeout_s)
        workloads = [job.workload(role) for role in SHARING if RLRoleType(role) in job.port.members]
        holders.append(sum(other.is_held for workload in workloads if workload for other in workload._device_locks))

    def receiving(cls):
        receive = cls.receive

        def in_turn(receiver, *arguments, **options):
            received.append(is_held(job, "ROLLOUT"))
            return receive(receiver, *arguments, **options)

        monkeypatch.setattr(cls, "receive", in_turn)

    acquire, received = DeviceLock.acquire, []
    for cls in (TorchRolloutEngine, PullTransport, CudaIpcTransport):
        receiving(cls)
    moving(TorchRolloutEngine, "cpu")
    moving(Fsdp2TrainEngine, "cpu")
    monkeypatch.setattr(DeviceLock, "acquire", acquiring)
    faults = {(30, "before"): kill("ACTOR", 0), (30, "after"): kill("ROLLOUT", 0)} if dies else None
    assert end_of(job, faults) == undisturbed
    assert moves == []
    assert {job.workload(role)._engine.place() for role in SHARING} == {"cuda"}
    assert {1} <= set(holders) <= {0, 1}, "they compute one at a time all the same"
    assert len(received) > 4 and set(map(tuple, received)) == {(True,)}, "the device compares and adds there"
    weights_kept = [job.workload(role)._memory.by_owner().get("weight sync of ACTOR[0]") for role in SHARING]
    assert (weights_kept[0] is not None, weights_kept[1:]) == (weight_sync == "cuda_ipc", [None, None])


@pytest.mark.parametrize("weight_sync", ["pull", "cuda_ipc"])
def test_rollout_lost_after_two_syncs_receives_both_again(tmp_path, weight_sync):
    """An evaluation sends the weights after the update."""

    def run(folder, faults=None):
        job = stage(folder, offload=False, weight_sync=weight_sync)
        job.config["eval_every"] = 1
        return end_of(job, faults), [method for _, _, method, *_ in job.port.calls].count("publish_weights")

    expected, publishes = run(tmp_path / "undisturbed")
    assert run(tmp_path / "dies", {(40, "after"): kill("ROLLOUT", 0)}) == (expected, publishes)


@pytest.mark.parametrize(("samples", "filtering"), [(4, "off"), (6, "off"), (4, "refill")])
def test_collocated_rollout_wakes_once_a_step(tmp_path, monkeypatch, samples, filtering):
    """Several rounds of a step sample with the same weights."""
    monkeypatch.setattr(collector, "_FIRST_POLL_S", 0.0)  # apart the trainer would look at once, and all the time
    job = stage(tmp_path, samples_per_prompt=samples, dynamic_filtering=filtering)
    wakes, read = [], []
    wake, add = TorchRolloutEngine.cuda, TorchRolloutEngine.add

    def waking(engine, part="all"):
        if engine.place() == "cpu":
            wakes.append(engine.version)
        wake(engine, part)

    def adding(engine, requests, sampling, seed):
        if sampling.temperature:  # else it is an evaluation
            read.extend((engine.version, *request.key, len(request.done)) for request in requests)
        add(engine, requests, sampling, seed)

    monkeypatch.setattr(TorchRolloutEngine, "cuda", waking)
    monkeypatch.setattr(TorchRolloutEngine, "add", adding)
    end_of(job)
    assert wakes == [0, 1, 2], "evaluation and step 1, step 2, evaluation"
    rounds = [method for _, _, method, *_ in job.port.calls].count("sample")
    assert (len(read), rounds) == (2 * 4 * samples, 2) or (filtering == "refill" and rounds > 2)
    assert len(read) == len(set(read))
    assert {done for *_, done in read} == {0}


def test_roles_on_their_own_devices_keep_their_engines(tmp_path, undisturbed):
    job, frozen = stage(tmp_path, APART), []

    class Noting(GRPOTrainer):
        def fit(self):
            super().fit()
            frozen.append(self.state["frozen_models"].state_dict())

    job.trainer = Noting
    assert end_of(job) == undisturbed
    assert frozen == [{"REFERENCE": fingerprint_files(Path(job.config["model"]))}]
    assert (job.workload("ACTOR")._device_locks, job.workload("ACTOR")._engine.place()) == ((), "cuda")


def test_rollout_in_turn_cannot_run_ahead(tmp_path):
    job = stage(tmp_path, max_staleness=1)
    with pytest.raises(InvocationError, match="cannot run ahead: rollout.max_staleness has to be 0"):
        job.run()


@pytest.mark.parametrize(
    ("device", "visible", "known_as"),
    [
        ("cuda", None, "cuda-0"),
        ("cuda:1", None, "cuda-1"),
        ("cuda", "3,5", "cuda-3"),
        ("cuda:1", "3,5", "cuda-5"),
        ("cuda", "GPU-8f2a", "cuda-GPU-8f2a"),
        ("cpu", "3", "cpu-0"),
    ],
)
def test_device_has_one_name_in_all_processes(monkeypatch, device, visible, known_as):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert physical_device(device) == known_as
