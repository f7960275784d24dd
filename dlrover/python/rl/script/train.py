# SPDX-License-Identifier: Apache-2.0
"""One call for each recipe: ``train_grpo(model, rows, reward=function, steps=100)``."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, JobFailed
from dlrover.python.rl.common.log import configure_logging
from dlrover.python.rl.common.names import hint, resume_command
from dlrover.python.rl.common.terminal import echo
from dlrover.python.rl.config.load import load_job_with, search_folders
from dlrover.python.rl.config.spec import RUNS, JobSpec
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.recipe import launch as launcher
from dlrover.python.rl.runtime.run.folder import LATEST, has_commits
from dlrover.python.rl.runtime.run.progress import ProgressView
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv
from dlrover.python.rl.script.inputs import Inputs
from dlrover.python.rl.script.result import TrainResult

LOCAL, RAY = "local", "ray"

Model: TypeAlias = str | Path
"""A folder or a hub name."""

Rows: TypeAlias = str | Path | Iterable[Mapping[str, Any]]
"""A file, a folder or a hub name; or the rows: a list of dicts, a ``datasets.Dataset``, a ``pandas.DataFrame``."""

Reward: TypeAlias = str | Callable[..., Any] | list[Any] | Mapping[Any, Any]
"""A function or its name, several, or several with weights; or the keys of ``reward``, ``{"model": folder}``."""


def train_grpo(
    model: Model,
    dataset: Rows | None = None,
    reward: Reward | None = None,
    *,
    env: Any = None,
    eval_dataset: Rows | None = None,
    runtime: str = LOCAL,
    **keys: Any,
) -> TrainResult:
    """Train a policy on groups of its own samples: GRPO, or ``algorithm="dapo"``, ``"rloo"``, ``"gspo"``, ....

    Functions and classes of a script or a notebook may be given as they are: they are sent to the processes that use
    them.

    Args:
        dataset: rows of ``prompt`` (text or messages) and any columns for the reward; None: ``env`` makes the prompts.
        env: an environment, its class, or its name, instead of ``reward``.
        eval_dataset: held-out prompts; None: some of ``dataset``.
        runtime: ``local``, in this process, or in those that ``torchrun`` has started; ``ray``, a cluster started for
            the run; or the address of a running cluster.
        keys: of the recipe's configuration, or of a job's layout: ``steps=100``, ``rollout={"max_new_tokens": 64}``,
            ``learning_rate=1e-6``, ``name="my-run"``, ``workload={"rollout": {"num": 2}}``.

    Raises:
        InvalidJob: with all errors; nothing was started.
        JobFailed: it ended in failure; carries the first cause.
        KeyboardInterrupt: it was interrupted.
    """
    return _train("grpo", runtime, keys, model=model, train=dataset, eval=eval_dataset, reward=reward, env=env)


def train_ppo(
    model: Model,
    dataset: Rows | None = None,
    reward: Reward | None = None,
    *,
    env: Any = None,
    eval_dataset: Rows | None = None,
    runtime: str = LOCAL,
    **keys: Any,
) -> TrainResult:
    """Train a policy and a critic on the policy's samples; arguments are those of :func:`train_grpo`."""
    return _train("ppo", runtime, keys, model=model, train=dataset, eval=eval_dataset, reward=reward, env=env)


def train_distill(
    model: Model,
    dataset: Rows,
    teacher: Model,
    *,
    reward: Reward | None = None,
    eval_dataset: Rows | None = None,
    runtime: str = LOCAL,
    **keys: Any,
) -> TrainResult:
    """Train a student on its own samples to say what ``teacher`` says; arguments are those of :func:`train_grpo`."""
    keys = {"teachers": {"teacher": {"model": str(teacher)}}, **keys}
    return _train("distill", runtime, keys, model=model, train=dataset, eval=eval_dataset, reward=reward)


def train_sft(
    model: Model, dataset: Rows, *, eval_dataset: Rows | None = None, runtime: str = LOCAL, **keys: Any
) -> TrainResult:
    """Train on examples: rows of ``prompt`` and ``response``, or of ``messages``."""
    return _train("sft", runtime, keys, model=model, train=dataset, eval=eval_dataset)


def train_dpo(
    model: Model, dataset: Rows, *, eval_dataset: Rows | None = None, runtime: str = LOCAL, **keys: Any
) -> TrainResult:
    """Train on preferences: rows of ``prompt``, ``chosen`` and ``rejected``."""
    return _train("dpo", runtime, keys, model=model, train=dataset, eval=eval_dataset)


def train_rm(
    model: Model, dataset: Rows, *, eval_dataset: Rows | None = None, runtime: str = LOCAL, **keys: Any
) -> TrainResult:
    """Train a reward model on preferences, as :func:`train_dpo`."""
    return _train("rm", runtime, keys, model=model, train=dataset, eval=eval_dataset)


def _train(recipe: str, runtime: str, keys: Mapping[str, Any], **given: Any) -> TrainResult:
    if runtime not in (LOCAL, RAY, "auto") and ":" not in runtime:
        what = f"'{runtime}' is neither {LOCAL} nor {RAY} nor a cluster's address{hint(runtime, (LOCAL, RAY))}"
        raise InvalidJob([ConfigError("runtime", what)])
    if given.get("env") is not None and given.get("reward") is not None:
        raise InvalidJob([ConfigError("reward", "is not used beside env, which gives the rewards: give one of them")])
    describe = partial(_describe, recipe, keys, given, runtime != LOCAL)
    return _run_here(recipe, describe, keys) if runtime == LOCAL else _run_on_ray(describe, runtime)


def _run_here(recipe: str, describe: Callable[[], JobSpec], keys: Mapping[str, Any]) -> TrainResult:
    launch = LaunchEnv.from_env(os.environ)
    configure_logging(f"rank {launch.rank}" if launch.world_size > 1 else "")
    started: list[JobSpec] = []

    def check() -> JobSpec:
        started.append(launcher.check_job(describe, launch, _show))
        view.title = started[0].name
        return started[0]

    try:
        with ProgressView(recipe, live=not launch.rank) as view:
            error = launcher.run_together(check, launch, view, view.announce)
    except KeyboardInterrupt:
        for job in started:
            _show_how_to_go_on(job.job_dir)
        raise
    if error is not None:
        raise error
    return TrainResult(started[0].job_dir if started else _folder(recipe, keys, LATEST))


def _run_on_ray(describe: Callable[[], JobSpec], runtime: str) -> TrainResult:
    from dlrover.python.rl.master import job as jobs  # imports Ray, which a run in this process does without

    checked = jobs.check_described(describe)
    for line in checked.inspection.about:
        _show(line)
    with ProgressView(checked.job.name) as view:
        status = jobs.run_on_ray(checked, view, None if runtime == RAY else runtime, announce=view.announce)
    jobs.raise_if_failed(status)
    if status.phase is not Phase.FINISHED:
        if status.reason == jobs.INTERRUPTED:
            _show_how_to_go_on(Path(status.folder))
            raise KeyboardInterrupt
        raise JobFailed(f"{status.name} was stopped: {status.reason}")
    return TrainResult(Path(status.folder))


def _show_how_to_go_on(folder: Path) -> None:
    if has_commits(folder):
        _show(f"resume after its last committed step: {resume_command(folder)}")


def _describe(recipe: str, keys: Mapping[str, Any], given: Mapping[str, Any], on_ray: bool) -> JobSpec:
    values = {**(_one_device(recipe) if on_ray else {}), **Inputs(_folder(recipe, keys) / "inputs").config(keys, given)}
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    search = search_folders(*([Path(main).absolute().parent] if main else []))
    return load_job_with(_file(recipe), values, search)


def _one_device(recipe: str) -> dict[str, Any]:
    """The layout of a job whose roles share one device of this machine."""
    roles = load_job_with(_file(recipe), {}, ()).workloads
    gpus = torch.cuda.device_count()
    return {
        "trainer": {"device_type": "GPU" if gpus else "CPU", "device_per_node": gpus or len(roles)},
        "workload_group": [{str(role).lower(): 1 for role in roles}],
    }


def _file(recipe: str) -> Path:
    return Path(launcher.__file__).with_name(f"{recipe}.yaml")


def _folder(recipe: str, keys: Mapping[str, Any], below: str = "") -> Path:
    """``job_dir``, or ``below`` the folder of the runs of this name."""
    return Path(keys["job_dir"]) if "job_dir" in keys else RUNS / str(keys.get("name", recipe)) / below


def _show(line: str) -> None:
    echo(line, err=True)
