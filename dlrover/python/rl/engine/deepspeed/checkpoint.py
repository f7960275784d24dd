"""A ZeRO engine on disk, each rank its own file: for the layout that wrote it."""

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.torch.checkpoint import present, write_folder
from dlrover.python.rl.engine.torch.loading import flush
from dlrover.python.rl.engine.torch.randomness import packed_random_state
from dlrover.python.rl.engine.torch.ranks import Ranks


def write_checkpoint(path: Path, ranks: Ranks, state: Mapping[str, Any]) -> None:
    """Write each rank's state and random state, whole or not at all.

    Args:
        path: the folder; replaced whole if it is there.
        ranks: all of the engine, which all have to call.
        state: this rank's.

    Raises:
        EngineError: some rank could not write.
    """

    def write(fresh: Path) -> None:
        file = _file(fresh, ranks.rank)
        torch.save({**state, "random": packed_random_state()}, file)
        flush(file)

    write_folder(path, ranks, write)


def read_checkpoint(path: Path, ranks: Ranks, layout: list[int]) -> dict[str, Any]:
    """This rank's state, and as ``random`` its packed random state.

    Raises:
        EngineError: there is no checkpoint, or it was written in another layout, whose files do not divide the model as
            this one does; every rank says so.
    """
    state: dict[str, Any] = {}
    fault = ""
    try:
        state = _read(path, ranks.rank, layout)
    except EngineError as error:
        fault = str(error)
    ranks.agree(fault)
    return state


def _read(path: Path, rank: int, layout: list[int]) -> dict[str, Any]:
    folder = present(path)
    if not _file(folder, 0).is_file():
        raise EngineError(f"no checkpoint at '{path}'")
    try:
        there = torch.load(_file(folder, 0), map_location="cpu", weights_only=True, mmap=True)["layout"]
        if there == layout:
            return dict(torch.load(_file(folder, rank), map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, UnpicklingError, LookupError) as error:
        raise EngineError(f"the checkpoint '{path}' cannot be read: {error}") from error
    raise EngineError(
        f"the checkpoint '{path}' is of layout {there} (the ranks' grid and the ZeRO stage), not {layout}:"
        " save the model in Hugging Face format to go on in another one"
    )


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pt"
