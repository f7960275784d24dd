# SPDX-License-Identifier: Apache-2.0
"""The constructors in several processes, as README files of their kind say: ``accelerate launch --num_processes 2``."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.processes import free_port

ROOT = Path(__file__).parents[3]
DEADLINE_S = 200.0
LAUNCHERS = {
    "accelerate": "accelerate.commands.launch --multi_gpu --num_processes=2 --main_process_port={port}",
    "torchrun": "torch.distributed.run --nproc_per_node=2 --master_port={port}",
}


def launched(launcher, *arguments):
    """Run the script in the processes of a launcher; what it printed."""
    module = ["-m", *LAUNCHERS[launcher].format(port=free_port()).split()] if launcher else []
    known = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER"))}
    paths = str(ROOT)
    child = subprocess.Popen(
        [sys.executable, *module, str(ROOT / "tests/support/launched_script.py"), *map(str, arguments)],
        env={**known, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=DEADLINE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 0, output
    return output


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def differ(one, other):
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["step"]]


@pytest.mark.feature(5, 138)
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_two_processes_train_and_evaluate_like_one(launcher, model, tmp_path):
    """One script, several trainers after each other: the effective batch is that of one process with twice the size."""
    if launcher == "accelerate":
        pytest.importorskip("accelerate")
    write_tiny_model(f"{model}-teacher", hidden=32, layers=2, max_positions=96, seed=7)
    which = ("sft", "grpo", "distill") if launcher == "accelerate" else ("sft", "grpo")
    launched(launcher, model, tmp_path / "two", 4, *which)
    launched(None, model, tmp_path / "one", 4, *which)
    told = [json.loads((tmp_path / "two" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert told[1] == dict.fromkeys(which, {})
    for name in which:
        assert sorted(path.name for path in (tmp_path / "two" / name).glob("step_*")) == ["step_2"]
        assert differ(tmp_path / "two" / name / "final", tmp_path / "one" / name / "final") < 1e-5
        assert differ(tmp_path / "two" / name / "final", model) > 1e-4
        both = zip(metrics(tmp_path / "two" / name), metrics(tmp_path / "one" / name), strict=True)
        for two, one in both:  # of both ranks, not of one
            figure = "eval/reward" if name == "sft" else "reward/mean"
            assert two[figure] == pytest.approx(one[figure], abs=1e-6)
            assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert told[0][name]["num_samples"] == 3


@pytest.mark.slow
def test_what_rank_0_refuses_ends_all(model, tmp_path):
    with pytest.raises(AssertionError, match="no such folder") as caught:
        launched("torchrun", "/no/such/model", tmp_path, 4, "grpo")
    assert "rank 0: has started nothing" in str(caught.value)
