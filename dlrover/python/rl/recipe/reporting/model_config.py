# SPDX-License-Identifier: Apache-2.0
"""``config.model_config``, which gives the shape of a model that is not on this machine, before a run starts."""

import os
from contextlib import suppress
from pathlib import Path

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.hub import is_cached
from dlrover.python.rl.common.names import nearest
from dlrover.python.rl.engine.model.model_shape import shape_of


def validate_model_config(given: str | None) -> list[ConfigError]:
    """It has to be a ``config.json``, a folder with one, or a model in this machine's cache of the hub."""
    if given is None or shape_of(given) is not None:
        return []
    path = Path(given).expanduser()
    if path.exists() or is_cached(given):
        what = f"{given} is no config.json of a language model, nor a folder with one"
    else:
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        may_be_of_hub = given.count("/") == 1 and not given.startswith((".", "/", "~")) and not given.endswith(".json")
        of_hub = ", nor a model in this machine's cache of the hub" if may_be_of_hub else ""
        what = f"no such file or folder: {given}{where}{of_hub}{_nearest_entry(path)}"
    return [ConfigError("config.model_config", what)]


def _nearest_entry(path: Path) -> str:
    """The entry that the first missing part of ``path`` may mean, as an end of a message."""
    missing = next(each for each in (*reversed(path.parents), path) if not each.exists())
    close = None
    with suppress(OSError):  # below a file, or a folder that may not be listed
        close = nearest(missing.name, os.listdir(missing.parent))
    return f"; did you mean '{missing.parent / close}'?" if close else ""
