# SPDX-License-Identifier: Apache-2.0
"""Training from a script that knows ``dlrover.rl`` only; and every code block and table of the integration guide, whose
table of names wins where it contradicts itself."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.master.job import check_job, run_here, run_on_ray
from dlrover.python.rl.trainer import trainer as trainer_module
from dlrover.python.rl.trainer import workload as workload_module
from dlrover.python.rl.trainer.workload import DEFAULT_OPTIONS
from docs.generate import remove_generated
from tests.support.commands import ROOT, run_python

GUIDES = ROOT / "docs" / "guides"
SMALL = "prompts_per_step=4, rollout={'samples_per_prompt': 2, 'max_new_tokens': 4}"


def run(code, folder, *launcher):
    """Run a script in ``folder``, with a tiny model in the place of its models; what it printed."""
    write_tiny_model(folder / "tiny", hidden=32, layers=1)
    (folder / "script.py").write_text(re.sub(r'"Qwen/[^"]+"', "'tiny'", code), encoding="utf-8")
    return run_python(folder, *launcher, "script.py").stdout


def in_small(code):
    """The keys of a quick run, added to a call."""
    return code.replace("steps=2,", f"steps=2, {SMALL},")


GRPO = in_small((GUIDES / "python" / "grpo.py").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_first_program_of_the_guide_trains_and_shows_metrics(tmp_path):
    shown = "print(run.model.is_dir(), len(run.steps), len(run.samples), sorted(run.summary)[0])\n"
    table, last = run(GRPO + shown, tmp_path).strip().rsplit("\n", 1)
    assert last == "True 2 16 before/eval/accuracy"
    assert "'eval/reward': " in table
    assert len(list((tmp_path / "runs/grpo").glob("*-*-*"))) == 1


@pytest.mark.slow
@pytest.mark.ray
def test_first_program_of_the_guide_runs_on_ray(tmp_path):
    assert "reward" in run(GRPO.replace("steps=2,", "steps=2, runtime='ray',"), tmp_path)


@pytest.mark.slow
def test_first_program_of_the_guide_runs_under_torchrun(tmp_path):
    output = run(GRPO, tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    assert output.count("'eval/reward': ") == 2
    assert len(list((tmp_path / "runs/grpo").glob("*-*-*"))) == 1


PROGRAMS = {
    "own_trainer": "pi is about 3.", "grpo_reward": "runs/grpo/", "sft": "'examples': 16",
    "two_turns": "'completion': ", "own_algorithm": "reward", "more/grpo": "'reward/in_range': ",
    "more/sft": "'held-out rows': 3", "more/two_turns": "'score': ", "more/own_algorithm": "(",
    "more/own_trainer": "finished a",
}  # fmt: skip
"""Programs that use what the pages say and no more, and what each prints."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "own_trainer")) for name in PROGRAMS]
)
def test_program_of_the_pages_runs(tmp_path, name):
    assert PROGRAMS[name] in run((GUIDES / "python" / f"{name}.py").read_text(encoding="utf-8"), tmp_path)


PRELUDE = """
import dlrover.rl as rl
model = "Qwen/x"
rows = [{"prompt": "p", "secret": n, "limit": 9, "answer": str(n)} for n in range(8)]
problems = rows
examples = [{"prompt": f"{n}", "response": f"{n}"} for n in range(8)]
"""


@pytest.mark.slow
def test_code_of_the_guide_runs(tmp_path):
    text = remove_generated((GUIDES / "python.md").read_text(encoding="utf-8"))
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    code = code.replace("env=Ask, rollout={", "env=Ask, steps=1, prompts_per_step=4, rollout={'max_new_tokens': 4, ")
    code = code.replace("epochs=1", "steps=1").replace("steps=100", in_small("steps=2,").rstrip(","))
    assert "right, steps=2" in code
    output = run(PRELUDE + code + "print([row['reward/mean'] for row in run.steps])", tmp_path)
    assert re.search(r"\[[\d.]+, [\d.]+\]", output)


def guide_job(tmp_path):
    builder = JobBuilder().device_type("CPU").device_per_node(4).config({"start": 10})
    module = "tests.examples.guide_code"
    builder.trainer(module, "UserTrainer").actor(module, "UserActorModel").total(4)
    builder.rollout(module, "UserRolloutModel").total(2)
    builder.with_collocation("actor", "rollout")
    return replace(builder.spec("guide", (str(Path(__file__).parent),)), job_dir=tmp_path)


def test_blocks_of_the_guide_run_twice_in_one_folder(tmp_path):
    for name in ("first", "second"):
        status = run_here(check_job(guide_job(tmp_path / name), local=True))
        assert status.phase is Phase.FINISHED, status.cause


@pytest.mark.slow
@pytest.mark.ray
def test_blocks_of_the_guide_run_on_ray(tmp_path, ray_session):
    status = run_on_ray(check_job(guide_job(tmp_path)), connected=True)
    assert status.phase is Phase.FINISHED, status.cause


def test_module_paths_of_the_guide_exist():
    assert workload_module.BaseWorkload is trainer_module.BaseWorkload
    assert workload_module.BaseWorkload.__module__ == "dlrover.python.rl.trainer.workload"
    assert trainer_module.BaseTrainer.__module__ == "dlrover.python.rl.trainer.trainer"


def test_trainer_invocation_has_the_defaults_of_the_table():
    table = {"blocking": True, "is_async": False, "timeout": 10, "target": "ALL", "auto_shard": True}
    table |= {"pre_func": None, "post_func": None}
    assert {name: getattr(DEFAULT_OPTIONS, name) for name in table} == table
