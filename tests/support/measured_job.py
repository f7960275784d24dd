# SPDX-License-Identifier: Apache-2.0
"""The demo's GRPO job, whose processes measure themselves: the processor seconds that go to spans and samples."""

import functools
import json
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from dlrover.python.rl.common.spans import SpanFile
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.online.batch import SampleLog
from dlrover.python.rl.recipe.workloads import ActorWorkload, ReferenceWorkload, RewardWorkload, RolloutWorkload
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.runtime.trainer_spans import RecordedPort
from tests.support.commands import processes_below
from tests.support.policy_jobs import policy_job, write_inputs

SHAPE = {"hidden": 96, "layers": 2, "heads": 3, "kv_heads": 3, "intermediate": 384, "max_positions": 64}
FOR_SAMPLES = {"texts", "token_columns", "write_samples", "cut_samples"}  # methods of workers

__all__ = ["ActorWorkload", "GRPOTrainer", "ReferenceWorkload", "RewardWorkload", "RolloutWorkload"]
_spent, _open = Counter(), threading.local()


def describe(folder, steps):
    """Return the job of ``examples/arithmetic/grpo.yaml`` with a random model and graded rewards."""
    write_inputs(folder, SHAPE)
    config = {"steps": steps, "prompts_per_step": 32, "rollout": {"samples_per_prompt": 8, "max_new_tokens": 4}}
    config["algorithm"] = {"name": "grpo", "averaging": "token", "kl_coef": 0.001}
    config["reward"] = {"function": "tests.chaos.graded:graded", "workers": 2}
    return policy_job(folder, "grpo", roles=["reference"], rollouts=2, module=__name__, **config)


def spent_seconds(folder):
    """Return the seconds that the processes of the job in ``folder`` have spent on each method so far."""
    return sum((Counter(json.loads(file.read_text())) for file in folder.glob("spent-*.json")), Counter())


def processor_seconds():
    """Return the processor seconds of all processes that this one has started, also through others."""
    ticks = 0
    for pid in processes_below(os.getpid()):
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _measure(owner, part, *names, is_counted=lambda *arguments: True):
    """Count the thread's processor seconds in methods of ``owner``, with the measured methods inside."""
    for name in names:
        method = functools.partial(_run, getattr(owner, name), f"{part}: {name}", is_counted)
        setattr(owner, name, functools.partialmethod(method))


def _run(method, part, is_counted, *arguments, **options):
    if getattr(_open, "is_measured", False) or not is_counted(*arguments):
        return method(*arguments, **options)
    _open.is_measured, began_s = True, time.thread_time()
    try:
        return method(*arguments, **options)
    finally:
        _spent[part] += time.thread_time() - began_s
        _open.is_measured = False


def _write_spent(flush, spans):
    """Write the seconds each time that the process writes its spans."""
    flush(spans)
    fresh = spans._path.parents[1] / f".{os.getpid()}-{threading.get_ident()}"
    fresh.write_text(json.dumps(_spent))
    fresh.replace(fresh.with_name(f"spent-{os.getpid()}.json"))


_measure(SpanFile, "spans", "add", "add_call", "flush")
_measure(RecordedPort, "spans", "_note_issue", "_note_wait", "begin_step")
_measure(SampleLog, "samples", "_begin_step", "_end_step", "remove_steps")
_measure(MemberHost, "samples", "invoke", is_counted=lambda host, header, *_: header.method in FOR_SAMPLES)
SpanFile.flush = functools.partialmethod(functools.partial(_write_spent, SpanFile.flush))
