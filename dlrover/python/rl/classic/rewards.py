# SPDX-License-Identifier: Apache-2.0
"""Carries environments to the processes that score completions.

::

    data set -> write_samples: train.jsonl, train.environments -> a recipe -> verifier's process: get_reward(completion)

The name of the reward function holds the folder, so the environments are loaded with it, outside any call's deadline.
"""

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import cloudpickle

from dlrover.python.rl.classic.envs import LoadedSample
from dlrover.python.rl.common.disk_space import replace
from dlrover.python.rl.common.errors import VerifierError

_SUFFIX = ".environments"


def reward_function(folder: Path) -> str:
    return f"{__name__}:{quote(str(folder.absolute())).replace('.', '%2E')}"


@dataclass(frozen=True)
class EnvironmentRewards:
    """Scores a completion by the environment of its row."""

    files: Mapping[str, Sequence[Any]]  # Environments by the name of their file.

    def __call__(self, completion: str, answer: str | None, extra_info: Mapping[str, Any]) -> float:
        """Return the environment's reward, or ``empty_reward`` of an empty completion; ``answer`` is not used.

        Raises:
            ValueError: the row has no environment.
            Exception: what the environment raises.
        """
        if "environments" not in extra_info:
            raise ValueError("this sample has no get_reward")
        if not completion and extra_info["empty_reward"] is not None:
            return float(extra_info["empty_reward"])
        environment = self.files[extra_info["environments"]][extra_info["number"]]
        return float(environment.get_reward(completion))


def __getattr__(name: str) -> Any:
    """Load the function that :func:`reward_function` names."""
    if not name.startswith("/"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    folder = Path(unquote(name))
    try:
        files = {path.stem: pickle.loads(path.read_bytes()) for path in folder.glob(f"*{_SUFFIX}")}
    except Exception as error:  # the user's classes may raise anything
        message = f"the environments in {folder} cannot be loaded: {type(error).__name__}: {error}"
        raise VerifierError(message) from error
    return EnvironmentRewards(files)


def remove_environments(folder: Path) -> None:
    for path in folder.glob(f"*{_SUFFIX}"):
        path.unlink()


def write_samples(
    folder: Path, name: str, samples: Sequence[LoadedSample], rewards: bool = False, empty_reward: float | None = None
) -> Path:
    """Write a data set for a recipe, and the environments beside it if they are to give rewards.

    They are pickled with their classes where these are the script's own, so they need not be importable.
    ``empty_reward`` is the reward of an empty completion; None: the environment's.

    Returns:
        The data file: rows of ``messages``, ``answer`` and ``extra_info``.

    Raises:
        TypeError: an environment cannot be pickled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scored = [rewards and sample.has_reward for sample in samples]
    if any(scored):
        replace(folder / f"{name}{_SUFFIX}", _pickle([sample.environment for sample in samples], name))
    rows = []
    for number, sample in enumerate(samples):
        row: dict[str, Any] = {"messages": sample.prompt}
        if sample.answer is not None:
            row["answer"] = str(sample.answer)
        if scored[number]:
            row["extra_info"] = {"environments": name, "number": number, "empty_reward": empty_reward}
        rows.append(row)
    file = folder / f"{name}.jsonl"
    replace(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return file.absolute()


def _pickle(environments: list[Any], name: str) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(environments)
    except Exception as error:  # pickling raises what the objects' own code raises
        raise TypeError(f"the samples of {name} cannot be pickled: {type(error).__name__}: {error}") from error
    return data
