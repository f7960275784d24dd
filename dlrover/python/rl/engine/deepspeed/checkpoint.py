"""A ZeRO engine on disk, each rank its own file: for the layout that wrote it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.torch.checkpoint import fresh_folder
from dlrover.python.rl.engine.torch.randomness import random_state, set_random_state
from dlrover.python.rl.engine.torch.ranks import Ranks


def write_checkpoint(path: Path, ranks: Ranks, state: Mapping[str, Any]) -> None:
    """Write each rank's state and random state; a reader sees the old folder or the new one, never a part.

    Args:
        path: the folder; replaced whole if it is there.
        ranks: all of the engine, which all have to call.
        state: this rank's.
    """
    with fresh_folder(path, ranks) as fresh:
        torch.save({**state, "random": random_state()}, fresh / _file(ranks.rank))


def read_checkpoint(path: Path, ranks: Ranks, layout: list[int]) -> dict[str, Any]:
    """This rank's state; the process's random state comes back too.

    Raises:
        EngineError: there is no checkpoint, or it was written in another layout, whose files do not divide the model as
            this one does.
    """
    first = path / _file(0)
    if not first.is_file():
        raise EngineError(f"no checkpoint at '{path}'")
    there = torch.load(first, map_location="cpu", weights_only=False, mmap=True)["layout"]
    if there != layout:
        raise EngineError(
            f"the checkpoint '{path}' is of layout {there} (the ranks' grid and the ZeRO stage), not {layout}:"
            " save the model in Hugging Face format to go on in another one"
        )
    state = torch.load(path / _file(ranks.rank), map_location="cpu", weights_only=False)
    set_random_state(state["random"])
    return dict(state)


def _file(rank: int) -> str:
    return f"rank-{rank}.pt"
