# SPDX-License-Identifier: Apache-2.0
"""The passes of a run: chosen once, for all ranks and their replacements."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.engine.model.model_shape import ModelShape
from dlrover.python.rl.recipe.base import engine_workload
from dlrover.python.rl.recipe.base.config import EngineConfig, PolicyConfig
from dlrover.python.rl.recipe.base.engine_workload import DeviceShare, TrainedWorkload
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.memory import plan as memory_plan
from dlrover.python.rl.recipe.memory.arithmetic import ModelUse
from dlrover.python.rl.recipe.memory.plan import MemoryPlan, all_stay, choose_passes, smallest_device, weights_stay
from dlrover.python.rl.recipe.roles.reward import ModelRewardWorkload, RewardWorkload
from dlrover.python.rl.recipe.roles.rollout import RolloutWorkload
from dlrover.python.rl.recipe.sft import SFTConfig, SFTTrainer
from dlrover.python.rl.recipe.trainers.recipe_plan import complete_config
from dlrover.python.rl.trainer.plan import plan_of
from dlrover.python.rl.trainer.port import Outcome, Pending, Ref
from tests.support.half_billion import SIZES

ACTOR, ROLLOUT = RLRoleType.ACTOR, RLRoleType.ROLLOUT
GIVEN = {"model": "m", "data": {"train": "d"}, "steps": 1, "batch_size": 1}
SMALL = ModelShape.of(AutoConfig.for_model("qwen2", **SIZES))


class Port:
    def wait(self, refs, timeout_s):
        return [Outcome(ref.token) for ref in refs]


class Group:
    """Workers of a role, of which two compute on the same rows: their devices, and what they were first given to
    keep."""

    workload_class = TrainedWorkload

    def __init__(self, *shares):
        self.shares, self.calls, self.kept = shares, [], None
        self.device_share = self._method("device_share", lambda engine: self.shares)
        self.keep_passes = self._method("keep_passes", self._keep)

    def _method(self, name, answers):
        def call(*arguments):
            self.calls.append(name)
            return Pending([Ref(Port(), answer) for answer in answers(*arguments)], replica=2)

        return SimpleNamespace(options=lambda blocking: call)

    def _keep(self, *choice):
        self.kept = self.kept or [choice] * len(self.shares)
        return self.kept


def device(name, gigabytes, in_turn=False):
    return DeviceShare(name, gigabytes * 1e9, in_turn)


@pytest.fixture
def trainer(monkeypatch):
    monkeypatch.setattr(memory_plan, "shape_of", lambda model, fallback=None: SMALL)
    return SimpleNamespace(
        actor_handles={ACTOR: [None, None]}, RG_ACTOR=Group(device("a/cuda-0", 80), device("a/cuda-1", 80))
    )


def choose(trainer, uses=None, **engine):
    cfg = complete_config(SFTConfig, {**GIVEN, "engine": engine}, "GPU")
    members = {role: len(handles) for role, handles in trainer.actor_handles.items()}
    return choose_passes(trainer, cfg, uses or plan_of(SFTTrainer).model_uses(cfg, members))


def chosen(trainer, **engine):
    settings = choose(trainer, **engine)
    assert settings.device_memory_gb == engine.get("device_memory_gb")
    return settings.max_tokens_per_microbatch, settings.gradient_checkpointing


def test_passes_fit_the_smallest_device_of_all_members(trainer):
    assert chosen(trainer) == (16384, False)
    trainer.RG_ACTOR = Group(device("a/cuda-0", 80), device("a/cuda-1", 12))
    assert chosen(trainer) == (16384, True)
    trainer.RG_ACTOR = Group(device("a/cuda-0", 80), device("a/cuda-1", 12))
    assert chosen(trainer, device_memory_gb=80) == (16384, False)


def test_given_passes_need_no_call(trainer):
    assert chosen(trainer, max_tokens_per_microbatch=100, gradient_checkpointing=True, offload=True) == (100, True)
    assert trainer.RG_ACTOR.calls == []


def test_first_choice_of_passes_stays(trainer):
    group = trainer.RG_ACTOR
    assert chosen(trainer) == (16384, False)
    calls = list(group.calls)
    group.shares = (device("b/cuda-0", 12), group.shares[1])
    assert chosen(trainer) == (16384, False)
    assert group.calls == 2 * calls, "the same calls: workers answer them from what they keep"
    group.kept = [(16384, True), (16384, False)]  # the first one is new, and the other one alone knows
    assert chosen(trainer) == (16384, False)


def test_members_share_a_device_they_have_together(trainer):
    uses = {ACTOR: ModelUse("trained", ""), ROLLOUT: ModelUse("rollout", "")}
    engine = EngineConfig(device="cuda")

    def smallest(*shares, rollouts=()):
        return smallest_device(engine, uses, {ACTOR: shares, ROLLOUT: rollouts})

    assert smallest(device("a", 80), device("a", 80)) == 40e9
    assert smallest(device("a", 80, in_turn=True), device("a", 80, in_turn=True)) == 80e9
    assert smallest(device("a", 80), device("b", 80), rollouts=[device("b", 80), device("c", 24)]) == 40e9
    assert smallest(None) is None
    assert smallest_device(replace(engine, device_memory_gb=2), uses, {ACTOR: [None]}) == 2e9
    trainer.RG_ACTOR = Group(None, None)
    assert chosen(trainer) == (16384, True)


# -- who stays on a device that is shared ------------------------------------------------------------------------------

BOTH = ("ACTOR", "ROLLOUT")
KINDS = {ACTOR: "trained", ROLLOUT: "rollout"}


def together(gigabytes, roles=BOTH, place="a"):
    return DeviceShare(place, gigabytes * 1e9, True, roles)


def plan_of_two(bounded=True, **engine):
    uses = {role: ModelUse(kind, "m", longest=512, bounded=bounded) for role, kind in KINDS.items()}
    engine = EngineConfig(**{"device": "cuda", "rollout": "torch", "precision": "bf16", **engine})
    return MemoryPlan(uses, engine.with_passes(16384, False), "m")


def stay(actors, rollouts, other_roles=(), **changes):
    return all_stay(plan_of_two(**changes), {ACTOR: actors, ROLLOUT: rollouts}, other_roles)


@pytest.fixture
def half_billion(monkeypatch):
    monkeypatch.setattr(memory_plan, "shape_of", lambda model, fallback=None: SMALL)


@pytest.mark.usefixtures("half_billion")
def test_engines_stay_on_a_device_with_room_for_all():
    """At most 34.4 GB for the actor, and 1.8 for a rollout that rests; 7 for an actor that rests."""
    assert stay([together(80)], [together(80)])
    assert not stay([together(44)], [together(44)])
    assert stay([together(46)], [together(46)])
    assert not stay([together(80), together(80, place="b")], [together(80), together(44, place="b")])


@pytest.mark.usefixtures("half_billion")
def test_weights_stay_on_a_device_with_room_for_a_copy():
    """The copy takes 1 GB twice, beside the 36.2 that the engines need."""

    def kept(actors, rollouts):
        return weights_stay(plan_of_two(), {ACTOR: actors, ROLLOUT: rollouts})

    one = [together(80)]
    assert kept(one, one)
    assert not kept([together(46)], [together(46)]) and stay([together(46)], [together(46)])
    assert not kept([together(47)], [together(47)]) and kept([together(48)], [together(48)])
    assert not kept([one[0]._replace(opens=False)], one)
    assert not kept(one, [together(80, place="b")])
    assert not kept(2 * one, one) and not kept(one, 2 * one) and not kept(one, []) and not kept([None], [None])


@pytest.mark.usefixtures("half_billion")
@pytest.mark.parametrize(
    ("gigabytes", "weight_sync", "expected"),
    [
        (80, "auto", (False, "cuda_ipc")),
        (80, "pull", (False, "pull")),
        (47, "auto", (False, "auto")),
        (47, "cuda_ipc", (True, "cuda_ipc")),
    ],
)
def test_weights_on_the_device_count_for_the_engines_there(gigabytes, weight_sync, expected):
    uses = {role: ModelUse(kind, "m", longest=512) for role, kind in KINDS.items()}
    trainer = SimpleNamespace(actor_handles={ACTOR: [None], ROLLOUT: [None]})
    trainer.RG_ACTOR, trainer.RG_ROLLOUT = Group(together(gigabytes)), Group(together(gigabytes))
    engine = {"rollout": "torch", "precision": "bf16", "weight_sync": weight_sync, "gradient_checkpointing": False}
    settings = choose(trainer, uses, max_tokens_per_microbatch=16384, **engine)
    assert (settings.offload, settings.weight_sync) == expected


@pytest.mark.usefixtures("half_billion")
def test_engines_leave_where_the_others_need_is_unknown():
    eighty = [together(80)]
    assert not stay([None], [None])
    assert not stay([DeviceShare("a", 80e9, False)], [DeviceShare("a", 80e9, False)]), "nothing is shared"
    assert not stay(eighty, eighty, rollout="vllm"), "it takes its share of the device whatever it needs"
    assert not stay(eighty, eighty, train="deepspeed")
    assert not stay(eighty, eighty, bounded=False)
    assert not stay(eighty, [eighty[0]._replace(free=30e9)]), "another job is there"
    assert not stay(eighty, [*eighty, DeviceShare("a", 80e9, False)]), "one is there at the same time"
    assert stay(eighty, [*eighty, DeviceShare("b", 80e9, False)])
    assert stay(eighty, eighty, other_roles=["CRITIC"]), "it is elsewhere"
    three = [together(80, (*BOTH, "CRITIC"))]
    assert not stay(three, three, other_roles=["CRITIC"])


def test_choice_of_offload_reaches_the_settings(trainer):
    def offload(*shares, roles=("ACTOR",), **engine):
        trainer.RG_ACTOR = Group(*(together(each, roles) for each in shares))
        return choose(trainer, **engine).offload

    assert offload(80, 80, rollout="torch", roles=("ACTOR",)) is False
    trainer.actor_handles["REWARD"], trainer.RG_REWARD = [None], SimpleNamespace(workload_class=RewardWorkload)
    assert offload(80, 80, rollout="torch", roles=("ACTOR", "REWARD")) is False
    assert offload(80, 80, rollout="torch", offload=True) is True
    assert offload(80, 12, rollout="torch", max_tokens_per_microbatch=16384, gradient_checkpointing=False) is True
    trainer.RG_REWARD = SimpleNamespace(workload_class=ModelRewardWorkload)
    assert offload(80, 80, rollout="torch", roles=("ACTOR", "REWARD")) is True


@pytest.mark.parametrize(
    ("data", "rollout", "bounded"),
    [
        ({"max_prompt_tokens": 100}, {}, True),
        ({}, {}, False),
        ({"max_prompt_tokens": 100}, {"env_path": "dlrover.python.rl.environment.verifiers:exact"}, False),
    ],
)
def test_use_without_a_limit_of_length_is_unbounded(data, rollout, bounded):
    config = {"model": "m", "data": {"train": "d", **data}, "rollout": rollout}
    cfg = complete_config(PolicyConfig, config, "GPU")
    assert plan_of(GRPOTrainer).model_uses(cfg, {ACTOR: 1})[ACTOR].bounded == bounded


def test_device_share_of_a_member_names_its_device():
    workload = TrainedWorkload(None, {})
    assert workload.device_share(EngineConfig(device="cpu")) is None
    engine = EngineConfig(device="cuda:1", device_memory_gb=3)
    share = workload.device_share(engine)
    assert (share.place.rpartition("/")[2], share.nbytes, share.in_turn) == ("cuda-1", 3e9, False)
    assert share.free == math.inf


def test_device_share_of_a_member_has_the_free_memory(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: {"cuda:1": (2e9, 3e9)}[device])
    monkeypatch.setattr(engine_workload, "shares_memory", {"cuda:1": False}.__getitem__)
    share = TrainedWorkload(None, {}).device_share(EngineConfig(device="cuda:1", device_memory_gb=3))
    assert (share.free, share.opens) == (2e9, False)


def test_device_share_of_an_own_process_leaves_cuda_unused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", None)
    share = RolloutWorkload(None, {}).device_share(EngineConfig(device="cuda:1", device_memory_gb=3, rollout="vllm"))
    assert (share.nbytes, share.free, share.opens) == (3e9, math.inf, False)
