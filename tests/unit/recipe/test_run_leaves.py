# SPDX-License-Identifier: Apache-2.0
"""The folder of a whole run: who can read its files, and what they say together."""

import json
import os

import pytest

from tests.support.policy_jobs import finished, policy_job

PRIVATE = ("checkpoints", "commits", "journal.jsonl")
"""What only a later start of the run needs."""


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), pytest.param(0o077, 0o600, marks=pytest.mark.slow)])
def test_run_folder_is_readable_as_the_umask_says_and_complete(tmp_path, umask, mode):
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    before = os.umask(umask)
    try:
        job = policy_job(tmp_path, "grpo", steps=1, engine={"threads": 1, "lora": {"rank": 2}}, keep={"save_every": 1})
        out, (step,) = finished(job)
    finally:
        os.umask(before)
    files = {path.relative_to(out): path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()}
    assert {str(name): bits for name, bits in files.items() if name.parts[0] not in PRIVATE and bits != mode} == {}
    assert {bits for name, bits in files.items() if name.parts[0] in PRIVATE} <= {0o600}
    models = {f"{folder}/{file}" for folder in ("model", "steps/step-1") for file in ADAPTED}
    assert models | {"job.yaml", "environment.jsonl", "metrics.jsonl", "samples.jsonl"} <= set(map(str, files))
    summary = json.loads((out / "summary.json").read_text())
    evaluated = {name.removeprefix("before/") for name in summary if name.startswith("before/")}
    assert evaluated == {"eval/accuracy", "eval/reward", "eval/failed"} and evaluated <= summary.keys()
    assert step["step"] == 1


ADAPTED = ("model.safetensors", "config.json", "adapter/adapter_model.safetensors", "adapter/adapter_config.json")
