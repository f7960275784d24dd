# SPDX-License-Identifier: Apache-2.0
"""The demo's GRPO job on Ray, whose processes note the processor seconds that they spend on spans and samples."""

import functools
import json
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from dlrover.python.rl.common.spans import SpanFile
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.online.batch import SampleLog
from dlrover.python.rl.recipe.workloads import ActorWorkload, ReferenceWorkload, RewardWorkload, RolloutWorkload
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.runtime.trainer_spans import RecordedPort
from tests.support.commands import ROOT
from tests.support.policy_jobs import write_inputs

SHAPE = {"hidden": 96, "layers": 2, "heads": 3, "kv_heads": 3, "intermediate": 384, "max_positions": 64}
FOR_SAMPLES = {"texts", "token_columns", "write_samples", "cut_samples"}
"""The workers' methods that serve only the files of samples."""

_spent, _open = Counter(), threading.local()


def describe(folder, steps):
    """Return the job of ``examples/arithmetic/grpo.yaml`` with a random model and graded rewards."""
    write_inputs(folder, SHAPE)
    builder = JobBuilder().device_type("CPU").device_per_node(8).trainer("tests.support.measured_job", "Trainer")
    for role, name, count in (("actor", "Actor", 1), ("rollout", "Rollout", 2), ("reward", "Reward", 1)):
        getattr(builder, role)("tests.support.measured_job", name).total(count)
    builder.reference("tests.support.measured_job", "Reference").total(1).with_collocation("actor", "reference")
    builder.config(
        {
            "model": str(folder / "model"),
            "data": {"train": str(folder / "problems.jsonl"), "eval_rows": 8},
            "steps": steps,
            "prompts_per_step": 32,
            "algorithm": {"name": "grpo", "averaging": "token", "kl_coef": 0.001},
            "optimizer": {"lr": 4e-4},
            "rollout": {"samples_per_prompt": 8, "max_new_tokens": 4},
            "reward": {"function": "tests.chaos.graded:graded", "workers": 2},
            "engine": {"train": "fsdp2", "rollout": "torch", "device": "cpu", "max_batch": 128},
        }
    )
    return builder.spec("measured", (str(ROOT),))


def spent_seconds(folder):
    """Return what all processes of the job in ``folder`` have spent so far on each part."""
    return sum((Counter(json.loads(file.read_text())) for file in folder.glob("spent-*.json")), Counter())


def processor_seconds():
    """Return the processor seconds of all processes that this one has started, also through others."""
    parents, seconds = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, parent, *fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(parent)
            seconds[int(file.parent.name)] = (int(fields[9]) + int(fields[10])) / os.sysconf("SC_CLK_TCK")

    def is_ours(pid):
        return pid in parents and (parents[pid] == os.getpid() or is_ours(parents[pid]))

    return sum(seconds[pid] for pid in seconds if is_ours(pid))


def _measure(owner, name, part, method_of=None):
    """Add the thread's processor seconds in a method to a part; a measured method inside counts as the outer part.
    ``method_of`` returns the name of the call that the arguments are of, empty if it is not measured."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def measured(*arguments, **options):
        method = method_of(*arguments) if method_of else name
        if not method or getattr(_open, "is_measured", False):
            return inner(*arguments, **options)
        _open.is_measured, began_s = True, time.thread_time()
        try:
            return inner(*arguments, **options)
        finally:
            _spent[f"{part}: {method}"] += time.thread_time() - began_s
            _open.is_measured = False

    setattr(owner, name, measured)


def _method_for_samples(host, header, *arguments):
    return header.method if header.method in FOR_SAMPLES else ""


def _write_spent(spans):
    """Write the sums each time that the process writes its spans, about once a second."""
    SpanFile.flush_measured(spans)
    fresh = spans._path.parents[1] / f".{os.getpid()}-{threading.get_ident()}"
    fresh.write_text(json.dumps(_spent))
    fresh.replace(fresh.with_name(f"spent-{os.getpid()}.json"))


class Trainer(GRPOTrainer):
    pass


class Actor(ActorWorkload):
    pass


class Rollout(RolloutWorkload):
    pass


class Reward(RewardWorkload):
    pass


class Reference(ReferenceWorkload):
    pass


if not hasattr(SpanFile, "flush_measured"):
    for method in ("add", "add_call", "flush"):
        _measure(SpanFile, method, "spans")
    for method in ("_note_issue", "_note_wait", "begin_step"):
        _measure(RecordedPort, method, "spans")
    for method in ("write_step", "remove_steps"):
        _measure(SampleLog, method, "samples")
    _measure(MemberHost, "invoke", "samples", _method_for_samples)
    SpanFile.flush_measured, SpanFile.flush = SpanFile.flush, _write_spent
