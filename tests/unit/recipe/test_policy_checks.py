# SPDX-License-Identifier: Apache-2.0
"""Errors in jobs of GRPO, PPO and distillation are found before anything starts."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.extensions import ROLES_ELSEWHERE
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.plain import to_plain
from dlrover.python.rl.engine.api import registry
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.master.job import check_job
from dlrover.python.rl.recipe.distill import DistillationConfig
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.rm import RMTrainer
from dlrover.python.rl.recipe.workloads import ActorWorkload, ScorerWorkload, ShardedReferenceWorkload
from dlrover.python.rl.trainer.plan import TrainerPlan, plan_of
from dlrover.python.rl.trainer.trainer import BaseTrainer
from tests.support.policy_jobs import grpo_job, policy_job, swap_tokens, write_inputs, write_teacher
from tests.support.run_files import write_rows

VERIFIERS = "dlrover.python.rl.environment.verifiers"
HOSTILE = str(Path(__file__).parents[2] / "support/hostile_rewards.py")


def problems_of(job):
    """The errors of a job by their places."""
    try:
        check_job(job, local=True)
    except InvalidJob as error:
        return {problem.where: problem.what for problem in error.errors}
    return {}


# -- values of the configuration ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "where", "message"),
    [
        ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt", "at least 2"),
        ("algorithm={name: ppo}", "algorithm", "needs values, which this trainer does not have; the trainer of"),
        ("algorithm={name: dapo, max_tokens: 100, overlong_buffer: 20}", "algorithm.max_tokens", "shaping"),
        ("data.eval_rows=4000", "data.eval_rows", "cannot be held out"),
        ("+data.eval={a: none.jsonl}", "data.eval.a", "none.jsonl: no such file"),
        ("+data.eval={}", "data.eval", "has no set"),
        ("+data.eval={a/b: none.jsonl}", "data.eval", "'a/b' is no name"),
        ("+eval.samples=2", "eval.samples", "needs config.eval.temperature"),
        ("engine.train=fspd2", "engine.train", "did you mean 'fsdp2'"),
        ("+engine.rollout_options={prefil_tokens: 2}", "engine.rollout_options.prefil_tokens", "prefill_tokens"),
        ("+engine.parallel={ddp_size: 2}", "engine.parallel", "1 ranks cannot be divided by ddp_size 2"),
        ("+engine.parallel={pipeline_parallel_size: 2}", "engine", "fsdp2 supports only 1"),
        ("+engine.rollout_tensor_parallel_size=2", "engine.rollout_tensor_parallel_size", "runs on one device"),
        ("+keep={best: acuracy}", "keep.best", "no metric 'acuracy'; did you mean 'eval/accuracy'"),
        (f"reward.function={VERIFIERS}:exat", "reward.function", "has no 'exat'; did you mean 'exact'?"),
        ("reward.function=exat", "reward.function", "no reward function is called 'exat'; did you mean 'exact'?"),
    ],
)
def test_grpo_with_a_bad_value_is_refused_with_its_place(tmp_path, override, where, message):
    problems = problems_of(grpo_job(tmp_path, "eval_every=1", override))
    assert message in problems[f"config.{where}"].lower(), problems


FILTERING = {"rollout": {"samples_per_prompt": 1, "dynamic_filtering": "refill"}}
DOUBTFUL = {"algorithm": {"name": "tests.support.column_engine:Doubtful"}}
CLASHING = {"engine": {"rollout": "tests.support.column_engine:ClashingEngine"}}
SGD = {"critic": {"optimizer": {"name": "sgd"}}, "engine": {"train": "megatron"}}


@pytest.mark.parametrize(
    ("recipe", "config", "where", "message"),
    [
        ("ppo", SGD, "critic.optimizer.name", "sgd"),
        ("ppo", {"critic": {"model": "./none"}}, "critic.model", "no such folder: ./none"),
        ("ppo", FILTERING, "rollout.dynamic_filtering", "needs rollout.samples_per_prompt above 1"),
        ("distill", {"teachers": {}}, "teachers", "names no teacher"),
        ("distill", {"teachers": {"teacher": {"model": "./none"}}}, "teachers.teacher.model", "no such folder: ./none"),
        ("distill", {"teachers": {"teecher": {"model": "a/b"}}}, "teachers.teecher", "did you mean 'teacher'"),
        ("distill", {"algorithm": {"name": "grpo"}}, "algorithm.name", "does not use teachers"),
        ("distill", FILTERING, "rollout.dynamic_filtering", "depends on rewards"),
        ("distill", {"algorithm": {"name": "vocabulary_distillation"}, "top": 1000}, "top", "is 1000, but"),
        ("grpo", DOUBTFUL, "algorithm", "it needs likely, margin,"),
        ("grpo", CLASHING, "engine.rollout", "declares a column 'ref_logprobs', which the trainer has already"),
        ("grpo", {"data": {"train": None, "eval_rows": 4}}, "data.train", "is required"),
        ("grpo", {"eval_every": 1, "keep": {"best": "eval/score"}}, "keep.best", "no metric 'eval/score'"),
    ],
)
def test_job_with_a_bad_value_is_refused_with_its_place(tmp_path, recipe, config, where, message):
    assert message in problems_of(policy_job(tmp_path, recipe, **config))[f"config.{where}"]


def test_ppo_without_its_reference_or_critic_is_refused(tmp_path):
    job = policy_job(tmp_path, "ppo", algorithm={"name": "openai_ppo"})
    assert "needs the role 'reference'" in problems_of(job)["workload"]
    job = policy_job(tmp_path, "ppo")
    del job.workloads["CRITIC"]
    assert problems_of(job)["workload"] == "the role 'critic' is required by PPOTrainer"


def test_errors_of_rows_models_and_options_come_together(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1+1=", "answer": 2}\n' * 6 + '{"prompt": 1+1}\n')
    wrong = ["algorithm.name=grpo", "+algorithm.clip_hi=0.3"]
    problems = problems_of(grpo_job(tmp_path, f"data.train={bad}", f"model={tmp_path}/modell", *wrong))
    assert any(where.startswith(f"{bad}:7") for where in problems)
    assert problems["config.model"] == f"no such folder: {tmp_path}/modell; did you mean '{tmp_path}/model'?"
    assert "did you mean 'clip_high'" in problems["config.algorithm.clip_hi"]


def test_unknown_options_hide_no_other_error(tmp_path):
    algorithm = {"name": "grpo", "kl_coeff": 0.1, "kl_coef": 0.1}
    engine = {"weight_sync_options": {"foldr": "x"}, "weight_sync": "dsk"}
    config = {"algorithm": algorithm, "rollout": {"samples_per_prompt": 1}, "engine": engine}
    engine_places = ["engine.weight_sync_options.foldr", "engine.weight_sync"]
    places = [f"config.{key}" for key in (*engine_places, "algorithm.kl_coeff", "rollout.samples_per_prompt")]
    assert list(problems_of(policy_job(tmp_path, "grpo", **config))) == [*places, "workload"]


@pytest.mark.parametrize(
    ("teachers", "where"),
    [(4, "config.teachers"), ({}, "config.teachers"), ({"teacher": 4}, "config.teachers.teacher")],
)
def test_wrong_teachers_are_the_only_problem_of_a_job(tmp_path, teachers, where):
    assert list(problems_of(policy_job(tmp_path, "distill", teachers=teachers))) == [where]


@pytest.mark.parametrize("name", ["sft", "reward_model"])
def test_grpo_with_an_algorithm_on_examples_is_refused(tmp_path, name):
    config = {**to_plain(grpo_job(tmp_path).config), "algorithm": {"name": name}}
    problems = plan_of(GRPOTrainer).check_config(config, dict.fromkeys(("ACTOR", "ROLLOUT", "REWARD"), 1))
    assert list(map(str, problems)) == ["config.algorithm.name: it learns from examples, not from samples"]


# -- engines and adapters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "engine", "where", "message"),
    [
        ("train", "deepspeed", "train", "'deepspeed' is not installed: pip install 'dlrover-rl[deepspeed]'"),
        ("rollout", "vllm", "rollout", "'vllm' is not installed: pip install 'dlrover-rl[vllm]'"),
        ("rollout", "sglang", "rollout_options.url", "sglang is not installed here: set its server's URL"),
    ],
)
def test_engine_not_installed_is_refused_with_a_remedy(tmp_path, kind, engine, where, message):
    if find_spec(engine):
        pytest.skip(f"{engine} is installed")
    job = grpo_job(tmp_path, f"engine.{kind}={engine}")
    assert problems_of(job)[f"config.engine.{where}"] == message
    token = ROLES_ELSEWHERE.set(frozenset({"ACTOR", "ROLLOUT"}))
    try:
        assert f"config.engine.{where}" not in problems_of(job)
    finally:
        ROLES_ELSEWHERE.reset(token)


def test_base_in_4_bits_may_be_divided_but_not_split(tmp_path):
    def problems(sizes):
        overrides = ["workload.actor.num=2", "+engine.lora={quantize_base: nf4}", f"+engine.parallel={sizes}"]
        return problems_of(grpo_job(tmp_path, *overrides))

    for sizes in ("{ddp_size: 1}", "{ddp_size: 2}", "{context_parallel_size: 2}"):
        assert not any("engine" in key for key in problems(sizes))
    message = problems("{tensor_parallel_size: 2}")["config.engine"]
    assert message == "adapters cannot be split: tensor_parallel_size must be 1, not 2"


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([], "names no layer: 'all-linear' is all layers except the output layer"),
        (["q_prj", "v_proj"], "no linear layer is named 'q_prj'; did you mean 'q_proj'"),
        (["mlp.up_proj"], None),
    ],
)
def test_layers_for_adapters_have_to_be_in_the_model(tmp_path, targets, message):
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    write_inputs(tmp_path)
    problems = problems_of(policy_job(tmp_path, "ppo", engine={"lora": {"targets": targets}}))
    assert problems == {} if message is None else message in problems["config.engine.lora.targets"]


def test_adapters_need_a_package_where_the_job_runs(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    here, elsewhere = (
        problems_of(policy_job(tmp_path, "ppo", engine={"lora": {"rank": 2}, "device": device, "max_batch": 0}))
        for device in ("cpu", "cuda")
    )
    assert here["config.engine.lora"] == "'peft' is not installed: pip install 'dlrover-rl[lora]'"
    assert "config.engine.lora" not in elsewhere


# -- classes, roles and plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "role", "wrong", "needed"),
    [
        ("grpo", "actor", "ScorerWorkload", "ActorWorkload"),
        ("grpo", "reward", "RolloutWorkload", "RewardWorkload"),
        ("ppo", "critic", "ActorWorkload", "CriticWorkload"),
        ("distill", "teacher", "ReferenceWorkload", "TeacherWorkload"),
    ],
)
def test_class_of_another_role_is_refused_with_the_right_one(tmp_path, recipe, role, wrong, needed):
    job = policy_job(tmp_path, recipe)
    job.workloads[role.upper()] = replace(job.workloads[role.upper()], class_=wrong)
    assert problems_of(job)[f"workload.{role}.class"].endswith(f"Trainer needs {needed} here, not {wrong}")


def test_classes_of_users_and_their_subclasses_are_accepted():
    class Own(ActorWorkload):
        pass

    def errors(trainer, **classes):
        return list(plan_of(trainer).check_workloads({RLRoleType(role): cls for role, cls in classes.items()}))

    assert errors(GRPOTrainer, ACTOR=Own, JUDGE=Own, CRITIC=object) == []
    (error,) = errors(RMTrainer, ACTOR=Own)
    assert error.what == "RMTrainer needs ScorerWorkload here, not Own, a kind of ActorWorkload"
    assert errors(RMTrainer, ACTOR=ScorerWorkload, REFERENCE=ShardedReferenceWorkload) == []


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


def test_hooks_of_a_recipes_subclass_add_to_its_plan(tmp_path):
    config, plan = policy_job(tmp_path, "grpo").config, plan_of(StrictTrainer)
    places = {error.where for error in plan.check_config({**config, "eval_every": -1}, {RLRoleType.ACTOR: 1})}
    assert {"config.eval_every", "workload", "config.steps"} <= places
    assert [error.what for error in plan.check_options(config)] == ["has to be odd"]
    assert [error.what for error in plan.check_workloads({})] == ["has to be mine"]
    assert plan.complete_config(config, "CPU")["steps"] == 7
    assert plan.settings_of_state({"seed": 3}) == {"seed": 3, "steps": 1}


def test_plan_of_a_trainer_with_a_method_plan_is_the_default():
    class Planner(BaseTrainer):
        def plan(self):
            """A user's method of this name is not a plan of checks."""

    assert type(plan_of(Planner)) is TrainerPlan


# -- rows and vocabularies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{"promt": "answer"}, {"level": "answer"}, {"answer": "answer"}])
def test_misspelt_name_of_a_column_is_refused(tmp_path, keys):
    train = str(tmp_path / "problems.jsonl")
    problems = problems_of(policy_job(tmp_path, "grpo", data={"train": train, "keys": keys}))
    message = f"{train}: data.keys: a row has no 'promt'; did you mean 'prompt'?"
    assert problems == ({"config.data.train": message} if "promt" in keys else {})


def test_conversations_need_a_chat_template(tmp_path):
    chat = {"messages": [{"role": "user", "content": "1+1="}], "answer": 2}
    rows = [*({"prompt": f"1+{number}=", "answer": 1 + number} for number in range(20)), chat]
    path = write_rows(tmp_path / "own.jsonl", rows)
    job = grpo_job(tmp_path, f"data.train={path}")
    assert problems_of(job) == {}
    (tmp_path / "model/chat_template.jinja").unlink()
    message = problems_of(job)["config.model"]
    assert f"no chat template, which the 'messages' of {path}:21 need" in message


def test_teacher_with_other_tokens_is_refused(tmp_path):
    write_inputs(tmp_path)
    other = write_tiny_model(tmp_path / "other", hidden=32, layers=1, heads=4, kv_heads=2, max_positions=32)
    swap_tokens(other, "A", "B")
    problems = problems_of(policy_job(tmp_path, "distill", teachers={"teacher": {"model": str(other)}}))
    assert "its vocabulary differs from the policy's: 'A' has id" in problems["config.teachers.teacher.model"]


# -- environments ------------------------------------------------------------------------------------------------------

UNUSED = {"env_isolated": False, "env_timeout_s": 9.0, "env_missing_state": "done", "env_failure_reward": 0.0}
UNUSED |= {"max_turns": 3, "env_options": {"a": 1}}


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"env_path": HOSTILE.replace("hostile", "hostle")}, "did you mean 'hostile_rewards.py'"),
        ({"env_path": f"{HOSTILE}:Bomb"}, "did you mean 'Bombs'"),
        ({"env_path": f"{HOSTILE}:Bombs", "env_options": {"sze": 2}}, "argument"),
        ({"env_path": HOSTILE, "env_options": {"a": 1}}, "take no options"),
        ({"env_path": HOSTILE}, None),
        ({"max_turns": 1}, None),
    ],
)
def test_environment_with_an_error_is_refused(tmp_path, rollout, message):
    reward = {"reward": {}} if "env_path" in rollout else {}
    config = {"rollout": {"samples_per_prompt": 4, **rollout}, **reward, "eval_every": 1}
    keep = {"keep": {"best": "eval/score"}} if message is None and reward else {}
    problems = problems_of(policy_job(tmp_path, "grpo", **config, **keep))
    assert problems == {} if message is None else message in problems["config.rollout.env_path"]


def test_options_of_an_environment_need_one(tmp_path):
    problems = problems_of(policy_job(tmp_path, "grpo", rollout={"samples_per_prompt": 4, **UNUSED}))
    assert problems == {f"config.rollout.{name}": "there is no env_path" for name in UNUSED}


AGENT = "tests.support.plain_agents:run"


@pytest.mark.feature(151)
@pytest.mark.parametrize(
    ("environment", "more", "where", "message"),
    [
        ({"agent": "tests.support.plain_agents:rum"}, {}, "environment.agent", "did you mean 'run'"),
        ({"agent": AGENT, "options": {"deph": 2}}, {}, "environment.agent", "did you mean 'depth'"),
        ({"options": {"depth": 2}}, {}, "environment.options", "there is no agent"),
        ({"timeout_s": 9.0}, {}, "environment.timeout_s", "there is no agent"),
        ({"agent": AGENT, "host": "0.0.0.0"}, {}, "environment.host", "give an address of the worker's node"),
        ({"agent": AGENT}, {"env_path": HOSTILE}, "environment.agent", "give one of them"),
        ({"agent": AGENT}, {"env_timeout_s": 9.0}, "rollout.env_timeout_s", "there is no env_path"),
    ],
)
def test_agent_with_an_error_is_refused(tmp_path, environment, more, where, message):
    rollout = {"samples_per_prompt": 4, **more}
    reward = {"reward": {}} if "agent" in environment else {}
    problems = problems_of(policy_job(tmp_path, "grpo", rollout=rollout, environment=environment, **reward))
    assert message in problems[f"config.{where}"]


@pytest.mark.parametrize(
    ("reward", "refused"),
    [
        ({"function": "gsm8k", "timeout_s": 9.0, "workers": 1, "memory_mb": 900}, None),
        ({"on_failure": "redraw", "max_redraws": 2, "give_up_after": 2}, {}),
        ({"thoughts": "scored"}, None),
        ({"model": "m"}, {"model"}),
    ],
)
def test_settings_of_the_reward_role_need_no_environment(tmp_path, reward, refused):
    rollout = {"samples_per_prompt": 4, "env_path": HOSTILE}
    problems = problems_of(policy_job(tmp_path, "grpo", rollout=rollout, reward=reward))
    unused = {f"config.reward.{name}" for name in (reward if refused is None else refused)}
    assert unused <= problems.keys() and (unused or not problems)
    assert all("rollout.env_path scores the samples" in problems[where] for where in unused)


@pytest.mark.parametrize("function", [None, DistillationConfig("m").reward.function, "gsm8k"])
def test_distillations_own_reward_may_stay_beside_an_environment(tmp_path, function):
    write_inputs(tmp_path)
    teachers = {"teacher": {"model": write_teacher(tmp_path)}}
    reward = {} if function is None else {"function": function}
    rollout = {"samples_per_prompt": 4, "max_new_tokens": 4, "env_path": HOSTILE}
    job = policy_job(tmp_path, "distill", rollout=rollout, reward=reward, teachers=teachers)
    assert list(problems_of(job)) == (["config.reward.function"] if function == "gsm8k" else [])
