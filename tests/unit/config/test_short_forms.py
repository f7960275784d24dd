# SPDX-License-Identifier: Apache-2.0
"""Recipes and numbers in place of classes and mappings, and roles that name a program."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.config.layout import RECIPES, job_from_mapping, job_to_yaml
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.recipe import workloads
from dlrover.python.rl.runtime.member.loading import load_class

CPU = {"device_type": "CPU", "device_per_node": 2}


def job(workload, trainer=CPU, **more):
    return job_from_mapping(OmegaConf.create({"trainer": trainer, "workload": workload, **more}), "programs")


def test_command_needs_no_class_and_no_actor():
    spec = job({"train": {"command": "python train.py", "num": 2}}, config={"lr": 1.0})
    assert spec.trainer.class_ == "ScriptTrainer"
    assert spec.workloads["TRAIN"].class_ == "Script"
    assert spec.workloads["TRAIN"].num == 2
    assert spec.config == {"lr": 1.0, "scripts": {"train": {"command": "python train.py"}}}
    assert spec.restart.workload_max_restart == {"train": 3}
    spec = job({"train": {"command": ["python", "train.py"]}, "serve": {"function": "server:main"}})
    assert load_job_text(job_to_yaml(spec), "programs", search_path=()) == spec
    with pytest.raises(InvalidJob, match=r"trainer\.module"):
        job({"actor": {"module": "m", "class": "C"}, "train": {"command": "x"}})


def test_program_keeps_its_limits_and_trainer():
    limits = {"restart": {"workload_max_restart": {"train": 0}}, "trainer": {**CPU, "module": "mine", "class": "Mine"}}
    spec = job({"actor": {"module": "m", "class": "C"}, "Train": {"command": "x", "hang_after_s": 60}}, **limits)
    assert (spec.trainer.class_, spec.restart.workload_max_restart) == ("Mine", {"train": 0})
    assert spec.workloads["TRAIN"].hang_after_s == 60


def test_program_joins_no_cluster_that_the_file_does_not_name():
    spec = job({"train": {"command": "x", "ray": True, "resource": {"cpu": 2, "memory": 8}}, "serve": {"command": "x"}})
    assert spec.config.scripts.train.ray == {"cpu": 2, "memory": 8}
    assert (spec.workloads["TRAIN"].env, spec.workloads["SERVE"].env) == ({}, {"RAY_ADDRESS": "local"})
    assert load_job_text(job_to_yaml(spec), "programs", search_path=()) == spec
    named = {"RAY_ADDRESS": "host:6379"}
    assert job({"serve": {"command": "x", "env": named}}).workloads["SERVE"].env == named
    assert job({"serve": {"command": "x"}}, env=named).workloads["SERVE"].env == {}


def test_command_may_have_variables_of_its_shell():
    text = r"workload: {train: {command: 'train.py --rank \${RANK} \${name}', num: 2}}"
    spec = load_job_text(text, "programs", search_path=())
    assert spec.config.scripts.train.command == "train.py --rank ${RANK} ${name}"
    assert load_job_text(job_to_yaml(spec), "programs", search_path=()) == spec


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ({"command": "x", "class": "C"}, "workload.train: has command and class: a role is a program or a class"),
        ({"command": "x", "function": "m:f"}, "workload.train: has command and function: a role runs one program"),
        ({"command": "x", "ray": "yes"}, "workload.train.ray: must be true or false, got 'yes'"),
        ({"command": "x", "ray": True}, "workload.train.resource.cpu: must be a number of whole CPUs"),
        ({"command": "x", "ray": True, "resource": {"cpu": 0.5}}, "workload.train.resource.cpu: must be a number of"),
        (
            {"command": "x", "ray": True, "resource": {"cpu": 1}, "env": {"RAY_ADDRESS": "auto"}},
            "workload.train.env.RAY_ADDRESS: cannot be set with ray: true, which sets it: remove one",
        ),
        ({"command": ""}, "workload.train: its command is empty"),
        ({"command": {"a": 1}}, "workload.train.command: must be text or a list of texts, got"),
        ({"command": "x", "nun": 2}, "workload.train.nun: unknown key 'nun'; did you mean 'num'?"),
    ],
)
def test_program_of_a_wrong_role_is_refused(role, message):
    with pytest.raises(InvalidJob) as refused:
        job({"train": role})
    assert message in str(refused.value)


ROOT = Path(__file__).parents[3]
LONG_FORMS = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("long_forms.yaml")))


@pytest.mark.parametrize("file", LONG_FORMS)
def test_job_file_short_and_long_gives_the_same_job(file):
    short = OmegaConf.load(ROOT / file)
    assert "recipe" in short and "workload" not in short
    shared = {key: short._get_node(key) for key in short if key not in ("recipe", "roles", "trainer")}
    long = OmegaConf.create({**LONG_FORMS[file], **shared})
    described = [load_job_text(OmegaConf.to_yaml(data), "job", search_path=()) for data in (short, long)]
    assert described[0] == described[1]
    assert list(described[0].workloads) == list(described[1].workloads)


def short_job(text, *overrides):
    return load_job_text(text, "short", overrides, search_path=())


def sizes(spec):
    return {str(role).lower(): (workload.class_, workload.num) for role, workload in spec.workloads.items()}


TWO = {"actor": ("ActorWorkload", 1), "rollout": ("RolloutWorkload", 1)}


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("recipe: sft", {"actor": ("ActorWorkload", 1)}),
        ("recipe: rm", {"actor": ("ScorerWorkload", 1)}),
        ("{recipe: grpo, roles: {rollout: {num: 1}}}", {**TWO, "reward": ("RewardWorkload", 1)}),
        ("{recipe: sft, roles: {actor: 8}}", {"actor": ("ActorWorkload", 8)}),
        ("{recipe: grpo, roles: {ACTOR: 1}, config: {rollout: {env_path: mine}}}", TWO),
        (
            "{recipe: dpo, config: {engine: {shard_frozen: true}}}",
            {"actor": ("ActorWorkload", 1), "reference": ("ShardedReferenceWorkload", 1)},
        ),
        (
            "{recipe: distill, config: {teachers: {maths: {}}, reward: {model: m}}}",
            {**TWO, "reward": ("ModelRewardWorkload", 1), "maths": ("TeacherWorkload", 1)},
        ),
        (
            "{recipe: 'mine:Mine', roles: {critic: 2, judge: {module: m, class: Judge, num: 3}}}",
            {"critic": ("CriticWorkload", 2), "judge": ("Judge", 3), "actor": ("ActorWorkload", 1)},
        ),
        ("{recipe: sft, roles: {actor: {class: Other}}}", {"actor": ("Other", 1)}),
    ],
)
def test_recipe_fills_in_classes_and_needed_roles(text, roles):
    assert sizes(short_job(text)) == roles


def test_recipe_of_a_job_on_gpus_leaves_them_to_models():
    text = "{recipe: grpo, roles: {actor: 1, rollout: 1, reward: {resource: {cpu: 4}}}}"
    assert short_job(text).workloads["REWARD"].resource == {"gpu": 0, "cpu": 4}
    assert short_job(text, "trainer.device_type=CPU").workloads["REWARD"].resource == {"cpu": 4}
    assert short_job(text, "roles.reward.resource.gpu=1").workloads["REWARD"].resource["gpu"] == 1
    assert short_job(text, "+reward.model=m").workloads["REWARD"].resource == {"cpu": 4}
    grouped = short_job(f"{text[:-1]}, workload_group: [{{reward: 1, actor: 1}}]}}")
    assert grouped.workloads["REWARD"].resource == {"cpu": 4}


@pytest.mark.parametrize("section", ["roles", "workload"])
def test_override_of_a_role_changes_the_role_of_the_file(section):
    text = "{recipe: grpo, roles: {actor: 2, rollout: {num: 4, standby: 1}}}"
    spec = short_job(text, f"{section}.actor.standby=1", f"{section}.rollout=6", f"{section}.reward.num=3")
    assert [(each.num, each.standby) for each in spec.workloads.values()] == [(2, 1), (6, 1), (3, 0)]
    assert short_job(text, "recipe=ppo").workloads["CRITIC"].num == 1


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("recipe: gropo", ["recipe: unknown recipe 'gropo'; did you mean 'grpo'?"]),
        ("recipe: 5", ["recipe: must be sft, rm, dpo, grpo, ppo, distill, or module:Class of your trainer, got 5"]),
        ("{recipe: grpo, roles: {actor: 0, rolout: 8}}", ["roles.rolout: the recipe has no role 'rolout'", "roles.a"]),
        ("{recipe: sft, roles: {judge: 2}}", ["roles.judge: the recipe has no role 'judge'; known: actor; a role of"]),
        ("{recipe: sft, roles: {actor: x}}", ["roles.actor: must be a mapping with module, class, num, "]),
        ("{recipe: sft, trainer: {class: X}}", ["trainer.class: recipe sets the trainer: remove one of the two"]),
        ("{recipe: sft, roles: {}, workload: {}}", ["roles: is another name of workload: leave one of them out"]),
        ("{recipe: sft, roles: [1]}", ["roles: must be a mapping, got [1]"]),
    ],
)
def test_wrong_short_form_is_answered_with_the_nearest(text, errors):
    with pytest.raises(InvalidJob) as refused:
        short_job(text)
    assert all(str(error).startswith(start) for error, start in zip(refused.value.errors, errors, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_table_of_recipes_names_existing_classes(name):
    spec = short_job(f"recipe: {name}")
    assert load_class(spec.trainer.module, spec.trainer.class_).config_class
    roles = [*RECIPES[name].needs, *RECIPES[name].options]
    assert all(hasattr(workloads, RECIPES[name].workload(role, None)) for role in roles)


@pytest.mark.parametrize("override", ["roles.actor.num=1", "workload.actor={num: 1}", "roles.actor=x"])
def test_override_below_a_list_of_roles_is_an_error(override):
    with pytest.raises(InvalidJob, match="roles"):
        short_job("{recipe: sft, roles: [1]}", override)
    with pytest.raises(InvalidJob, match=r"roles\.actor\.env\.A: a part of this key must be the number"):
        short_job("{recipe: sft, roles: {actor: {env: [1]}}}", "roles.actor.env.A=1")


@pytest.mark.parametrize("config", ["{teachers: 3}", "{engine: x, reward: 3, rollout: [1]}", "{teachers: '${none}'}"])
def test_recipe_beside_wrong_settings_leaves_them_to_the_check(config):
    spec = short_job(f"{{recipe: distill, workload_group: [], config: {config}}}")
    assert list(spec.workloads) == ["ACTOR", "ROLLOUT", "REWARD"]
