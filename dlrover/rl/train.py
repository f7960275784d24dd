# SPDX-License-Identifier: Apache-2.0
"""A function for each recipe, for scripts and notebooks: ``train_grpo(model, rows, reward=function, steps=100)``.

Its arguments become a job's configuration; rows and code become files.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from hashlib import blake2b
from math import isnan
from pathlib import Path
from typing import Any, TypeAlias

from dlrover.python.rl.common.by_value import name_for
from dlrover.python.rl.common.disk_space import replace
from dlrover.python.rl.common.errors import ConfigError, InvalidJob, JobFailed
from dlrover.python.rl.common.log import configure_logging, echo
from dlrover.python.rl.common.names import hint, resume_command
from dlrover.python.rl.config.load import load_job_with, search_folders
from dlrover.python.rl.config.spec import RUNS, JobSpec
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.data.jsonl import drop_nulls_of_calls
from dlrover.python.rl.data.source import as_plain
from dlrover.python.rl.master.client.run import check_described, raise_if_failed, run_on_ray
from dlrover.python.rl.master.process.status import INTERRUPTED
from dlrover.python.rl.recipe import launch as launcher
from dlrover.python.rl.recipe.base.config import RewardConfig
from dlrover.python.rl.runtime.run.folder import LATEST, has_commits
from dlrover.python.rl.runtime.run.progress import ProgressView
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv
from dlrover.rl.result import TrainResult

LOCAL, RAY = "local", "ray"
_MODEL_REWARD = {"module": "dlrover.python.rl.recipe.workloads", "class": "ModelRewardWorkload"}

_show = partial(echo, err=True)

Model: TypeAlias = str | Path  # a folder or a hub name

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
    """Train a policy on groups of generated samples: GRPO, or ``algorithm="dapo"``, ``"rloo"``, ``"gspo"``, ....

    Functions and classes of a script or a notebook can be passed directly.

    Args:
        dataset: rows of ``prompt`` (text or messages) and any columns for the reward; None: ``env`` makes the prompts.
        env: an environment, its class, or its name, instead of ``reward``.
        eval_dataset: held-out prompts; None: some of ``dataset``.
        runtime: ``local``, this process or the processes of ``torchrun``; ``ray``, a cluster started for the run; or
            the address of a running cluster.
        keys: keys of the recipe's configuration or of a job file: ``steps=100``, ``rollout={"max_new_tokens": 64}``,
            ``learning_rate=1e-6``, ``name="my-run"``, ``workload={"rollout": {"num": 2}}``.

    Raises:
        InvalidJob: with all errors; nothing was started.
        JobFailed: the run failed; carries the first cause.
        KeyboardInterrupt: the run was interrupted.
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
    """Train a policy and a critic on the policy's samples, with the arguments of :func:`train_grpo`."""
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
    """Train a student on its own samples to match ``teacher``. See :func:`train_grpo` for the arguments."""
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
    """Train a reward model on the rows of :func:`train_dpo`."""
    return _train("rm", runtime, keys, model=model, train=dataset, eval=eval_dataset)


def _train(recipe: str, runtime: str, keys: Mapping[str, Any], **arguments: Any) -> TrainResult:
    if runtime not in (LOCAL, RAY, "auto") and ":" not in runtime:
        message = f"'{runtime}' is neither {LOCAL} nor {RAY} nor a cluster's address{hint(runtime, (LOCAL, RAY))}"
        raise InvalidJob([ConfigError("runtime", message)])
    if arguments.get("env") is not None and arguments.get("reward") is not None:
        raise InvalidJob([ConfigError("reward", "cannot be used with env, which gives the rewards: pass one of them")])
    describe = partial(_describe, recipe, keys, arguments, runtime != LOCAL)
    return _run_here(recipe, describe, keys) if runtime == LOCAL else _run_on_ray(describe, runtime)


def _run_here(recipe: str, describe: Callable[[], JobSpec], keys: Mapping[str, Any]) -> TrainResult:
    launch = LaunchEnv.from_env(os.environ)
    configure_logging(f"rank {launch.rank}" if launch.world_size > 1 else "")
    started: list[JobSpec] = []
    try:
        check = partial(launcher.check_job, describe, launch, _show)
        error = launcher.show_together(recipe, check, launch, started)
    except KeyboardInterrupt:
        for job in started:
            _show_how_to_go_on(job.job_dir)
        raise
    if error is not None:
        raise error
    return TrainResult(started[0].job_dir if started else _folder(recipe, keys, LATEST))


def _run_on_ray(describe: Callable[[], JobSpec], runtime: str) -> TrainResult:
    checked = check_described(describe)
    for line in checked.inspection.about:
        _show(line)
    with ProgressView(checked.job.name) as view:
        status = run_on_ray(checked, view, None if runtime == RAY else runtime, announce=view.announce)
    raise_if_failed(status)
    if status.phase is not Phase.FINISHED:
        if status.reason == INTERRUPTED:
            _show_how_to_go_on(Path(status.folder))
            raise KeyboardInterrupt
        raise JobFailed(f"{status.name} was stopped: {status.reason}")
    return TrainResult(Path(status.folder))


def _show_how_to_go_on(folder: Path) -> None:
    if has_commits(folder):
        _show(f"resume after its last committed step: {resume_command(folder)}")


def _describe(recipe: str, keys: Mapping[str, Any], arguments: Mapping[str, Any], on_ray: bool) -> JobSpec:
    file = launcher.recipe_file(recipe)
    values = write_inputs(_folder(recipe, keys) / "inputs", keys, arguments)
    if on_ray:  # the roles share a device of this machine
        import torch  # not at the top, so that the core names the missing library

        roles, gpus = load_job_with(file, {}, ()).workloads, torch.cuda.device_count()
        devices = {"device_type": "GPU" if gpus else "CPU", "device_per_node": gpus or len(roles)}
        values = {"trainer": devices, "workload_group": [{str(role).lower(): 1 for role in roles}], **values}
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    search = search_folders(*([Path(main).absolute().parent] if main else []))
    return load_job_with(file, values, search)


def _folder(recipe: str, keys: Mapping[str, Any], below: str = "") -> Path:
    """Return ``job_dir``, or ``below`` in the folder of this name's runs."""
    return Path(keys["job_dir"]) if "job_dir" in keys else RUNS / str(keys.get("name", recipe)) / below


def write_inputs(folder: Path, keys: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``keys`` with the named arguments. Rows and code are written to ``folder``, under names made of their
    content, so that a resumed run finds them. Raises InvalidJob."""
    try:
        values = {key: _to_plain(value, folder) for key, value in keys.items() if key != "algorithm"}
        values["model"] = _model(arguments["model"])
        for split in ("train", "eval"):
            if arguments[split] is not None:
                values[f"data.{split}"] = _write_rows(arguments[split], split, folder)
        if arguments.get("env") is not None:
            values["rollout.env_path"] = _name(arguments["env"], folder)
        if arguments.get("reward") is not None:
            values["reward"] = _reward(arguments["reward"], folder)
            if values["reward"].get("model"):
                values["workload.reward"] = _MODEL_REWARD
    except OSError as error:
        raise InvalidJob([ConfigError("job_dir", f"{folder} cannot be written: {error.strerror}")]) from error
    if "algorithm" in keys:
        values["algorithm"] = _algorithm(keys["algorithm"], folder)
    return values


def _write_rows(dataset: Any, split: str, folder: Path) -> str:
    if isinstance(dataset, str | Path):
        return str(dataset)
    lines, argument = [], "dataset" if split == "train" else "eval_dataset"
    is_table = any(hasattr(dataset, name) for name in ("iterrows", "column_names"))  # of pandas, of datasets
    if hasattr(dataset, "iterrows"):  # missing values of a ``DataFrame`` are NaN, NaT or NA
        dataset = dataset.astype(object).where(dataset.notna(), None).to_dict("records")
    for number, row in enumerate(_iterate(dataset, argument), start=1):
        if not isinstance(row, Mapping):
            raise InvalidJob([ConfigError(argument, f"row {number} is {type(row).__name__}, not a dict")])
        try:
            lines.append(_line_of_table(row) if is_table else _line(row))
        except (TypeError, ValueError) as error:
            raise InvalidJob([ConfigError(argument, f"row {number}: {error}")]) from error
    content = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")  # lone surrogates, as JSON's
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{split}-{blake2b(content, digest_size=6).hexdigest()}.jsonl"
    if not file.exists():
        replace(file, content)
    return str(file)


def _reward(reward: Any, folder: Path) -> dict[str, Any]:
    if isinstance(reward, list | tuple):
        reward = dict.fromkeys(reward, 1.0)
    if not isinstance(reward, Mapping) or any(key not in RewardConfig.__dataclass_fields__ for key in reward):
        reward = {"function": reward}
    function = reward.get("function")
    if isinstance(function, Mapping):
        return {**reward, "function": {_name(each, folder): weight for each, weight in function.items()}}
    return {**reward, "function": _name(function, folder)} if "function" in reward else dict(reward)


def _algorithm(algorithm: Any, folder: Path) -> dict[str, Any]:
    if isinstance(algorithm, Mapping):
        return {key: _to_plain(value, folder) for key, value in algorithm.items()}
    if is_dataclass(algorithm) and not isinstance(algorithm, type):
        return {"name": _name(type(algorithm), folder), **asdict(algorithm)}
    return {"name": _name(algorithm, folder)}


def _name(value: Any, folder: Path) -> str:
    try:
        return value if isinstance(value, str) else name_for(value, folder)
    except TypeError as error:
        raise InvalidJob([ConfigError("code", str(error))]) from error


def _to_plain(value: Any, folder: Path) -> Any:
    """Replace paths by their text, dataclasses by their fields, and code by its name."""
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item, folder) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item, folder) for item in value]
    return _name(value, folder) if callable(value) else value


def _model(model: Any) -> str:
    """Return the place of a model; raise InvalidJob for another value."""
    if isinstance(model, str | Path) and str(model):
        return str(model)
    kind = "None" if model is None else f"a {type(model).__name__}"
    advice = "; model.save_pretrained(folder) makes one" if hasattr(model, "save_pretrained") else ""
    raise InvalidJob([ConfigError("model", f"is {kind}, but must be a folder or a hub name{advice}")])


def _iterate(rows: Any, argument: str) -> Any:
    if isinstance(rows, Mapping):
        advice = "give a list of rows, [{...}, ...], one of its splits, or datasets.Dataset.from_dict"
        message = f"is a dict of {', '.join(map(str, rows))}: {advice}({argument}) of its columns"
        raise InvalidJob([ConfigError(argument, message)])
    try:
        return iter(rows)
    except TypeError as error:
        message = f"must be a file, a hub name or rows, not {type(rows).__name__}"
        raise InvalidJob([ConfigError(argument, message)]) from error


def _line(row: Mapping[Any, Any]) -> str:
    return json.dumps(dict(row), ensure_ascii=False, default=_as_json)


def _line_of_table(row: Mapping[Any, Any]) -> str:
    """Convert a row as ``data.source`` does for Parquet files, whatever its columns are called."""
    line = _line({key: None if isinstance(value, float) and isnan(value) else value for key, value in row.items()})
    if '"tool_calls"' not in line:
        return line
    plain = json.loads(line)
    return _line({key: drop_nulls_of_calls({"messages": value})["messages"] for key, value in plain.items()})


def _as_json(value: Any) -> Any:
    """Convert numbers and arrays of NumPy and torch, and values that are text in files, such as dates."""
    plain = as_plain(value)
    if plain is not value:
        return plain
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON: {str(value)[:80]}")
