"""Environments on their way to the processes that judge completions, and what they say there.

::

    data set -> write_rows: train.jsonl, train.environments -> a recipe -> verifier's process: get_reward(completion)

The name of the reward function holds the folder: whatever the environments import is loaded with the function, so that
no call's deadline pays for it.
"""

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import cloudpickle

from dlrover.python.rl.classic.envs import Taken
from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.recipe.disk import replace

_SUFFIX = ".environments"


def reward_function(folder: Path) -> str:
    """The name of the reward function for the files that :func:`write_rows` has put into a folder."""
    return f"{__name__}:{quote(str(folder.absolute())).replace('.', '%2E')}"


@dataclass(frozen=True)
class Environments:
    """Judges completions.

    Attributes:
        files: the environments of each file, by its name.
    """

    files: Mapping[str, Sequence[Any]]

    def __call__(self, completion: str, answer: str | None, extra_info: Mapping[str, Any]) -> float:
        """What the row's environment says of a completion.

        Args:
            completion: the text.
            answer: not looked at: the environment has its own.
            extra_info: of a row that :func:`write_rows` wrote.

        Raises:
            ValueError: the row has no environment.
            Exception: what the environment raises.
        """
        if "environments" not in extra_info:
            raise ValueError("this sample has no get_reward")
        if not completion and extra_info["missing"] is not None:
            return float(extra_info["missing"])
        environment = self.files[extra_info["environments"]][extra_info["number"]]
        return float(environment.get_reward(completion))


def __getattr__(name: str) -> Any:
    """What :func:`reward_function` names."""
    if not name.startswith("/"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    folder = Path(unquote(name))
    try:
        return Environments({path.stem: pickle.loads(path.read_bytes()) for path in folder.glob(f"*{_SUFFIX}")})
    except Exception as error:  # the user's classes raise what they like
        raise VerifierError(
            f"the environments in {folder} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def write_rows(folder: Path, name: str, taken: Sequence[Taken], missing: float | None = None) -> Path:
    """Write a data set for a recipe, and its environments beside it if they have rewards.

    The environments are pickled with their classes where these are the script's own, so they need not be importable.

    Args:
        folder: where; made if it is not there.
        name: of the files.
        taken: the samples.
        missing: the reward of an empty completion; None: what the environment says of it.

    Returns:
        The data file: rows of ``messages``, ``answer`` and ``extra_info``.

    Raises:
        TypeError: an environment cannot be pickled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environments = folder / f"{name}{_SUFFIX}"
    if any(item.rewards for item in taken):
        replace(environments, _pickled([item.environment for item in taken], name))
    rows = []
    for number, item in enumerate(taken):
        row: dict[str, Any] = {"messages": item.prompt}
        if item.answer is not None:
            row["answer"] = str(item.answer)
        if item.rewards:
            row["extra_info"] = {"environments": name, "number": number, "missing": missing}
        rows.append(json.dumps(row) + "\n")
    path = folder / f"{name}.jsonl"
    replace(path, "".join(rows).encode())
    return path.absolute()


def write_examples(folder: Path, name: str, taken: Sequence[Taken]) -> Path:
    """Write a data set to learn by heart: rows of ``messages``, the answer as the last of them."""
    folder.mkdir(parents=True, exist_ok=True)
    answers = [
        [{"role": "assistant", "content": str(item.answer)}] if item.answer is not None else [] for item in taken
    ]
    rows = [json.dumps({"messages": [*item.prompt, *last]}) for item, last in zip(taken, answers, strict=True)]
    path = folder / f"{name}.jsonl"
    replace(path, "".join(f"{row}\n" for row in rows).encode())
    return path.absolute()


def _pickled(environments: list[Any], name: str) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(environments)
    except Exception as error:  # pickling raises what the objects' own code raises
        raise TypeError(f"the samples of {name} cannot be pickled: {type(error).__name__}: {error}") from error
    return data
