# SPDX-License-Identifier: Apache-2.0
"""The modules of the package that one GRPO step crosses: ``make trace-step``.

A local job (a random model of 68 thousand parameters, 4 prompts, 4 samples of each) runs for three steps in this
process. A module counts if at least one of its functions runs during step 2, its commit included; imports do not count.
"""

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.spec import CheckpointSpec, JobSpec
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.master.job import check_job, run_here
from dlrover.python.rl.trainer.steps import Steps
from tests.chaos.job import SHAPE, WORKLOADS

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "dlrover" / "python" / "rl"
TRACED_STEP, STEPS = 2, 3


class StepTracer:
    """Records the files of ``dlrover`` whose functions are called while it is active, in all threads.

    Threads that exist before :meth:`install` are not traced.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_active = False
        self._prefix = str(PACKAGE)

    @contextmanager
    def install(self) -> Any:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # typeshed lacks the None

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if self.is_active and event == "call" and frame.f_code.co_name != "<module>":
            path = frame.f_code.co_filename
            if path.startswith(self._prefix):
                self.files.add(path)

    def modules(self) -> list[str]:
        """The recorded modules, relative to the package: ``engine/rollout/requests.py``."""
        return sorted(str(Path(path).relative_to(PACKAGE)) for path in self.files)


def tiny_job(folder: Path) -> JobSpec:
    write_tiny_model(folder / "model", **SHAPE)
    rows = [f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(1, 10) for b in range(1, 10)]
    (folder / "prompts.jsonl").write_text("".join(rows), encoding="utf-8")
    config = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "prompts.jsonl"), "eval_rows": 4},
        "steps": STEPS,
        "prompts_per_step": 4,
        "eval_every": 0,
        "algorithm": {"name": "grpo", "kl_coef": 0.0},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 12},
        "reward": {"function": "tests.chaos.graded:graded", "workers": 1},
        "engine": {"threads": 1},
    }
    builder = JobBuilder().device_type("CPU").device_per_node(8).config(config)
    builder.trainer("dlrover.python.rl.recipe.grpo", "GRPOTrainer")
    for role, name in (("actor", "ActorWorkload"), ("rollout", "RolloutWorkload"), ("reward", "RewardWorkload")):
        getattr(builder, role)(WORKLOADS, name).total(1)
    job = builder.spec("trace", search_path=(str(REPOSITORY),))
    object.__setattr__(job, "job_dir", folder / "out")
    object.__setattr__(job, "checkpoint", CheckpointSpec(commit_every=8))  # step 2 is between two commits
    return job


def trace_step() -> list[str]:
    """Run the job; returns the modules of step 2."""
    tracer, begin = StepTracer(), Steps.begin

    def begin_traced(steps: Steps, step: int, *args: Any, **kwargs: Any) -> Any:
        tracer.is_active = step == TRACED_STEP
        return begin(steps, step, *args, **kwargs)

    Steps.begin = begin_traced  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder, tracer.install():
            run_here(check_job(tiny_job(Path(folder)), local=True))
    finally:
        Steps.begin = begin  # type: ignore[method-assign]
    return tracer.modules()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_trace", description=__doc__)
    parser.add_argument("--count", action="store_true", help="print the number only")
    options = parser.parse_args(argv)
    modules = trace_step()
    if options.count:
        print(len(modules))
        return 0
    folders = Counter(str(Path(module).parent) for module in modules)
    print(f"step {TRACED_STEP} crosses {len(modules)} modules in {len(folders)} folders")
    for folder, count in sorted(folders.items()):
        names = ", ".join(Path(module).stem for module in modules if str(Path(module).parent) == folder)
        print(f"{folder:32} {count:3}  {names}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
