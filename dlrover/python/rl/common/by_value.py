# SPDX-License-Identifier: Apache-2.0
"""Functions, classes and objects of a script or a notebook, which other processes cannot import, as files.

The name of such an object, ``dlrover.python.rl.common.by_value:<file>``, is loaded like the name of an importable one.
"""

import copyreg
import dataclasses
import pickle
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import cloudpickle

from dlrover.python.rl.common.disk_space import replace

# Dataclasses compare with it by identity: a copy would be a default value.
copyreg.pickle(type(dataclasses.MISSING), lambda _: "MISSING")


def name_for(value: Any, folder: Path) -> str:
    """Return a name by which other processes load ``value``: its own, or a new file's in ``folder``. Raises
    TypeError if it cannot be pickled."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    loaded: Any = sys.modules.get(module or "")
    is_importable = module != "__main__" and getattr(loaded, "__spec__", None) is not None
    for part in path.split("."):
        loaded = getattr(loaded, part, None)
    if is_importable and loaded is value:
        return f"{module}:{path}"
    label = path.rpartition(".")[2].strip("<>") or type(value).__name__
    return name_of_file(write(value, folder, label))


def write(value: Any, folder: Path, label: str) -> Path:
    """Pickle ``value`` into ``folder``; raises TypeError if it cannot be pickled."""
    try:
        content: bytes = cloudpickle.dumps(value)
    except Exception as error:  # pickling raises what the objects' own code raises
        raise TypeError(f"{label} cannot be pickled: {type(error).__name__}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{label}-{blake2b(content, digest_size=6).hexdigest()}.pickle"
    replace(file, content)
    return file


def name_of_file(file: Path) -> str:
    return f"{__name__}:{quote(str(file.absolute())).replace('.', '%2E')}"


def readable_name(name: str) -> str:
    """Return the label of a file's name, and other names unchanged."""
    return label_of(name) if name.startswith(f"{__name__}:") else name


def label_of(name: str) -> str:
    """Return the last part of a dotted name, or the label of a file's name."""
    path = unquote(name.rpartition(":")[2])
    return Path(path).stem.rpartition("-")[0] if path.startswith("/") else path.rpartition(".")[2]


def __getattr__(name: str) -> Any:
    if not name.startswith("/"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    try:
        return pickle.loads(Path(unquote(name)).read_bytes())  # noqa: TID251 -- a script's own functions
    except FileNotFoundError as error:
        raise AttributeError(f"{unquote(name)} is gone") from error
