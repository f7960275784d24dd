# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a job of PPO or of distillation is said before it starts."""

import json
from dataclasses import replace

import pytest

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.engine.api import registry
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.master.job import check_job, run_here
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.rm import RMTrainer
from dlrover.python.rl.recipe.workloads import ActorWorkload, ScorerWorkload, ShardedReferenceWorkload
from dlrover.python.rl.trainer.plan import TrainerPlan, plan_of
from dlrover.python.rl.trainer.trainer import BaseTrainer
from tests.support.policy_jobs import policy_job, write_inputs

ACTOR = RLRoleType.ACTOR


def problems_of(job):
    with pytest.raises(InvalidJob) as caught:
        check_job(job, local=True)
    return {problem.where: problem.what for problem in caught.value.errors}


@pytest.mark.parametrize(
    ("config", "where", "what"),
    [
        ({"critic": {"optimiser": {}}}, "config.critic.optimiser", "did you mean 'optimizer'"),
        ({"critic": {"warmup_steps": -1}}, "config.critic.warmup_steps", "greater than or equal to 0"),
        (
            {"critic": {"optimizer": {"name": "sgd"}}, "engine": {"train": "megatron"}},
            "config.critic.optimizer.name",
            "sgd",
        ),
        ({"critic": {"model": "./none"}}, "config.critic.model", "no such folder: ./none"),
        ({"updates_per_step": 0}, "config.updates_per_step", "greater than 0"),
        (
            {"rollout": {"samples_per_prompt": 1, "dynamic_filtering": "refill"}},
            "config.rollout.dynamic_filtering",
            "needs rollout.samples_per_prompt above 1",
        ),
        ({"algorithm": {"name": "distillation"}}, "config.algorithm", "the trainer of recipe.distill has it"),
        ({"algorithm": {"name": "openai_ppo"}}, "workload", "needs the role 'reference'"),
    ],
)
def test_ppo(tmp_path, config, where, what):
    assert what in problems_of(policy_job(tmp_path, "ppo", **config))[where]


@pytest.mark.parametrize(
    ("recipe", "role", "given", "needed"),
    [
        ("grpo", "actor", "ScorerWorkload", "ActorWorkload"),
        ("grpo", "reward", "RolloutWorkload", "RewardWorkload"),
        ("ppo", "critic", "ActorWorkload", "CriticWorkload"),
        ("distill", "teacher", "ReferenceWorkload", "TeacherWorkload"),
    ],
)
def test_a_class_of_another_role_is_refused_with_the_right_one(tmp_path, recipe, role, given, needed):
    job = policy_job(tmp_path, recipe)
    job.workloads[role.upper()] = replace(job.workloads[role.upper()], class_=given)
    assert problems_of(job)[f"workload.{role}.class"].endswith(f"Trainer needs {needed} here, not {given}")


class StrictTrainer(GRPOTrainer):
    @classmethod
    def check_config(cls, config, roles):
        yield from super().check_config(config, roles)
        yield ConfigError("config.steps", "has to be even")

    @classmethod
    def check_options(cls, config):
        yield ConfigError("config.seed", "has to be odd")

    @classmethod
    def check_workloads(cls, workloads):
        yield ConfigError("workload.actor.class", "has to be mine")

    @classmethod
    def complete_config(cls, config, devices):
        return {**config, "steps": 7}

    @classmethod
    def settings_of_state(cls, config):
        return {**super().settings_of_state(config), "steps": 1}


class Planner(BaseTrainer):
    def plan(self):
        """A user's method of this name is not a plan of checks."""


def test_trainer_of_a_user_adds_errors_to_the_recipes(tmp_path):
    config = policy_job(tmp_path, "grpo", eval_every=-1).config
    places = [error.where for error in plan_of(StrictTrainer).check_config(config, {ACTOR: 1})]
    assert {"config.eval_every", "workload", "config.steps"} <= set(places)


def test_hooks_of_a_recipes_subclass_add_to_its_plan(tmp_path):
    config, plan = policy_job(tmp_path, "grpo").config, plan_of(StrictTrainer)
    assert [error.what for error in plan.check_options(config)] == ["has to be odd"]
    assert [error.what for error in plan.check_workloads({})] == ["has to be mine"]
    assert plan.complete_config(config, "CPU")["steps"] == 7
    assert plan.settings_of_state({"seed": 3}) == {"seed": 3, "steps": 1}


def test_plan_of_a_trainer_with_a_method_plan_is_the_default():
    assert type(plan_of(Planner)) is TrainerPlan


def test_classes_of_users_and_their_subclasses_are_not_refused():
    class Own(ActorWorkload):
        pass

    assert not [
        *plan_of(GRPOTrainer).check_workloads({ACTOR: Own, RLRoleType("JUDGE"): Own, RLRoleType("CRITIC"): object})
    ]
    (error,) = plan_of(RMTrainer).check_workloads({ACTOR: Own})
    assert error.what == "RMTrainer needs ScorerWorkload here, not Own, a kind of ActorWorkload"
    assert not [
        *plan_of(RMTrainer).check_workloads({ACTOR: ScorerWorkload, RLRoleType("REFERENCE"): ShardedReferenceWorkload})
    ]


@pytest.mark.parametrize(
    ("keys", "hints"), [({"promt": "answer"}, 1), ({"level": "answer"}, 0), ({"answer": "answer"}, 0)]
)
def test_a_misspelt_name_of_a_column_is_refused(tmp_path, keys, hints):
    data = {"train": str(tmp_path / "problems.jsonl"), "keys": keys}
    job = policy_job(tmp_path, "grpo", data=data)
    if not hints:
        check_job(job, local=True)
        return
    found = f"{data['train']}: data.keys: a row has no 'promt'; did you mean 'prompt'?"
    assert problems_of(job) == {"config.data.train": found}


@pytest.mark.parametrize(
    ("targets", "what"),
    [
        ([], "names no layer: 'all-linear' is all layers except the output layer"),
        (["q_prj", "v_proj"], "no linear layer is named 'q_prj'; did you mean 'q_proj'"),
        (["self_attn.q_proj", "lm_head"], "the output layer shares the embedding's weight"),
        ("all-linear", None),
        (["mlp.up_proj"], None),
    ],
)
def test_layers_for_adapters_are_those_of_the_model(tmp_path, targets, what):
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    write_inputs(tmp_path)
    job = policy_job(tmp_path, "ppo", engine={"lora": {"targets": targets}})
    if what is None:
        assert check_job(job, local=True).inspection.errors == ()
    else:
        assert what in problems_of(job)["config.engine.lora.targets"]


def test_adapters_need_a_package_where_the_job_runs(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    here, elsewhere = ({"lora": {"rank": 2}, "device": device} for device in ("cpu", "cuda"))
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    missing = "'peft' is not installed: pip install 'dlrover-rl[lora]'"
    assert problems_of(policy_job(tmp_path, "ppo", engine=here))["config.engine.lora"] == missing
    assert "config.engine.lora" not in problems_of(policy_job(tmp_path, "ppo", engine={**elsewhere, "max_batch": 0}))


@pytest.mark.parametrize(
    ("teachers", "where", "what"),
    [
        ({}, "config.teachers", "names no teacher"),
        ({"teacher": {"model": "./none"}}, "config.teachers.teacher.model", "no such folder: ./none"),
        ({"teecher": {"model": "a/b"}}, "config.teachers.teecher", "did you mean 'teacher'"),
        ({"teacher": {"model": "a/b", "weight": 0}}, "config.teachers.teacher.weight", "greater than 0"),
    ],
)
def test_distillation(tmp_path, teachers, where, what):
    assert what in problems_of(policy_job(tmp_path, "distill", teachers=teachers))[where]


@pytest.mark.parametrize(
    ("teachers", "where"),
    [(4, "config.teachers"), ({}, "config.teachers"), ({"teacher": 4}, "config.teachers.teacher")],
)
def test_wrong_teachers_are_the_only_problem_of_a_job(tmp_path, teachers, where):
    assert list(problems_of(policy_job(tmp_path, "distill", teachers=teachers))) == [where]


def test_an_unknown_option_hides_nothing(tmp_path):
    config = {
        "algorithm": {"name": "grpo", "kl_coeff": 0.1, "kl_coef": 0.1},
        "rollout": {"samples_per_prompt": 1},
        "engine": {"weight_sync_options": {"foldr": "x"}, "weight_sync": "dsk"},
    }
    assert list(problems_of(policy_job(tmp_path, "grpo", **config))) == [
        "config.engine.weight_sync_options.foldr",
        "config.engine.weight_sync",
        "config.algorithm.kl_coeff",
        "config.rollout.samples_per_prompt",
        "workload",
    ]


@pytest.mark.parametrize(
    ("config", "where", "what"),
    [
        ({"algorithm": {"name": "grpo"}}, "config.algorithm.name", "does not use teachers"),
        (
            {"rollout": {"samples_per_prompt": 2, "dynamic_filtering": "drop"}},
            "config.rollout.dynamic_filtering",
            "depends on rewards",
        ),
    ],
)
def test_what_has_no_meaning_for_distillation(tmp_path, config, where, what):
    assert what in problems_of(policy_job(tmp_path, "distill", **config))[where]


def test_a_job_without_its_critic_is_refused(tmp_path):
    job = policy_job(tmp_path, "ppo")
    object.__setattr__(job, "workloads", {role: spec for role, spec in job.workloads.items() if role != "CRITIC"})
    assert problems_of(job)["workload"] == "the role 'critic' is required by PPOTrainer"


@pytest.fixture
def other_tokens(tmp_path):
    """A job whose teacher gives two tokens each other's ids."""
    write_inputs(tmp_path)
    other = write_tiny_model(tmp_path / "other", hidden=32, layers=1, heads=4, kv_heads=2, max_positions=32)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return policy_job(tmp_path, "distill", teachers={"teacher": {"model": str(other)}})


def test_a_teacher_that_means_other_tokens_is_refused(other_tokens):
    assert (
        "its vocabulary differs from the policy's: 'A' has id"
        in (problems_of(other_tokens)["config.teachers.teacher.model"])
    )


@pytest.mark.slow
def test_so_is_one_whose_tokens_are_only_known_once_it_is_loaded(other_tokens, monkeypatch):
    monkeypatch.setattr("dlrover.python.rl.recipe.distill.validate_vocabulary", lambda model, policy, where: [])
    status = run_here(check_job(other_tokens, local=True))
    assert status.phase is Phase.FAILED
    assert "the model of the role 'teacher' has another vocabulary" in status.cause.message + status.cause.detail


def test_no_more_likely_ids_than_tokens(tmp_path):
    write_inputs(tmp_path)
    job = policy_job(tmp_path, "distill", algorithm={"name": "vocabulary_distillation"}, top=1000)
    assert "is 1000, but" in problems_of(job)["config.top"]
