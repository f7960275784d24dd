# SPDX-License-Identifier: Apache-2.0
"""Every recipe under launchers, against one process."""

import json
import re
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.support.launching import (
    DISTILL,
    GRPO,
    GUIDE,
    PAIRS,
    PPO,
    SFT,
    TORCHRUN,
    TWO,
    TWO_STEPS,
    differ,
    launched_rank,
    run,
    weights,
    write_desk,
)
from tests.support.processes import free_port
from tests.support.processes import run as run_ranks


@pytest.fixture
def desk(tmp_path):
    return write_desk(tmp_path)


@pytest.mark.feature(3)
@pytest.mark.slow
def test_torchrun_with_two_processes_leaves_one_model(desk):
    (shown,) = re.findall(
        r"^torchrun --nproc_per_node=2 (-m dlrover.python.rl.recipe.sft .*)$", GUIDE.read_text(), re.M
    )
    line = shown.replace("runs/tiny", "model").replace("docs/guides/own_data/examples.jsonl", "examples.jsonl")
    said = run(desk, f"{TWO} {line} batch_size=15")
    assert "finished" in said
    found = [path.relative_to(desk).as_posix() for path in desk.rglob("*.safetensors")]
    assert sorted(found) == [
        "model/model.safetensors",
        f"runs/sft/{(desk / 'runs/sft/latest').resolve().name}/model/model.safetensors",
        "teacher/model.safetensors",
    ]
    rows = [json.loads(line) for line in (desk / "runs/sft/latest/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]


@pytest.mark.feature(4)
@pytest.mark.slow
def test_two_launchers_of_one_process_end_in_the_weights_of_one_with_two(desk):
    port = free_port()
    nodes = [
        f"{TORCHRUN} --nnodes=2 --node_rank={rank} --nproc_per_node=1 --master_addr=127.0.0.1 --master_port={port}"
        f" {SFT} job_dir=nodes"
        for rank in (0, 1)
    ]
    run(desk, *nodes)
    run(desk, f"{TWO} {SFT} job_dir=node")
    run(desk, f"{SFT} job_dir=alone")
    assert differ(desk / "nodes", desk / "node") == 0.0
    assert 0.0 <= differ(desk / "nodes", desk / "alone") < 1e-5
    assert differ(desk / "nodes", desk) > 1e-4


@pytest.mark.feature(5)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", TWO_STEPS.values(), ids=TWO_STEPS)
def test_accelerate_launch_runs_two_steps_of_each_recipe(desk, recipe):
    pytest.importorskip("accelerate")
    began_s = time.monotonic()
    launcher = f"-m accelerate.commands.launch --multi_gpu --num_processes=2 --main_process_port={free_port()}"
    said = run(desk, f"{launcher} {recipe}")
    assert time.monotonic() - began_s < 60
    assert "step 2/2" in said
    (runs,) = (desk / "runs").iterdir()
    out = (runs / "latest").resolve()
    assert {path.parent.name for path in out.rglob("*.safetensors")} == {
        "model",
        *(["critic"] if recipe == PPO else []),
    }
    if "eval_every" in recipe:
        rows = metrics(out)
        assert all("eval/accuracy" in row or "eval/reward" in row for row in rows)


TIMES = ("time/", "speed/", "memory/")


def metrics(folder):
    """The metrics of each step that do not depend on time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith((*TIMES, "sandbox/"))} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rm", "dpo"])
def test_pairs_are_learned_alike_in_one_process_and_in_two_though_one_has_no_pair_at_times(desk, recipe):
    line = f"-m dlrover.python.rl.recipe.{recipe} {PAIRS} eval_every=2 keep.best=eval/loss"
    run(desk, f"{line} job_dir=one")
    said = run(desk, f"{TWO} {line} job_dir=two")
    assert "best/eval/loss" in said
    rows = [
        [json.loads(row) for row in (desk / name / "metrics.jsonl").read_text().splitlines()] for name in ("one", "two")
    ]
    for alone, together in zip(*rows, strict=True):
        for name in (name for name in alone if not name.startswith(TIMES)):
            assert together[name] == pytest.approx(alone[name], abs=1e-5), name
    for name in ("model", "best"):
        first, second = (load_file(desk / job / name / "model.safetensors") for job in ("one", "two"))
        assert first.keys() == second.keys()
        assert all(torch.allclose(first[key], second[key], atol=1e-5) for key in first)


@pytest.mark.feature(138)
@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        f"{GRPO} algorithm.kl_coef=0.1 optimizer.lr=5e-4",
        f"{GRPO} updates_per_step=10 epochs=2 optimizer.lr=2e-4",
        f"{PPO} algorithm.kl_coef=0.1 algorithm.correction=truncate updates_per_step=2",
        f"{DISTILL} algorithm.name=vocabulary_distillation top=16 optimizer.lr=5e-4",
    ],
    ids=["grpo", "updates", "ppo", "distill"],
)
def test_a_recipe_is_the_same_in_one_process_and_in_two(desk, line):
    run(desk, f"{line} job_dir=one")
    run(desk, f"{TWO} {line} job_dir=two")
    assert (desk / "one/samples.jsonl").read_text() == (desk / "two/samples.jsonl").read_text()
    for one, two in zip(metrics(desk / "one"), metrics(desk / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-5), "metrics are of all rows, not of one rank's"
    # AdamW makes of the rounding of a gradient near 0 up to some percent of the learning rate: 1e-3 would be too much.
    assert differ(desk / "one", desk / "two") < 1e-5
    assert differ(desk / "one", desk) > 1e-4


@pytest.mark.feature(138)
def test_figures_are_means_over_the_rows_of_both_processes_and_are_written_once(desk):
    line = GRPO.replace("steps=2", "steps=1 job_dir=out").replace("eval_every=1 ", "")
    assert run_ranks(2, launched_rank, desk, line) == [0, 0]
    _, step = metrics(desk / "out")
    rewards = [json.loads(row)["reward"] for row in (desk / "out/samples.jsonl").read_text().splitlines()]
    assert len(rewards) == 4 * 4
    means = [sum(part) / len(part) for part in (rewards, rewards[:8], rewards[8:])]
    assert step["reward/mean"] == pytest.approx(means[0])
    assert len(set(means)) == 3, "those of one rank would be others"


@pytest.mark.feature(97)
@pytest.mark.slow
def test_filtering_may_leave_fewer_samples_than_there_are_ranks(desk):
    few = "prompts_per_step=3 rollout.samples_per_prompt=2 steps=4 rollout.dynamic_filtering=drop job_dir=out"
    alike = PPO.replace(":jumble", ":often_alike").replace("eval_every=1 ", "")
    run(desk, f"{TORCHRUN} --nproc_per_node=3 {alike} {few}")
    steps = [json.loads(line) for line in (desk / "out/metrics.jsonl").read_text().splitlines()]
    trained_on_two = [step for step in steps if step.get("groups/filtered") == 2]
    assert len(steps) == 1 + 4
    assert trained_on_two
    assert all({"loss", "critic/loss"} <= step.keys() for step in trained_on_two)


def test_the_weights_that_are_compared_are_compared(desk):
    assert differ(desk, desk) == 0.0
    assert torch.is_tensor(next(iter(weights(desk).values())))
