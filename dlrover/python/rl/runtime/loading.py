"""Importing the user's classes by name, inside the process that runs them."""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import ClassNotFound
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.trainer.workload import undecorated


def enter_folder(folder: str) -> None:
    """Work in ``folder``, where the job was described: its relative paths are meant from there. A node that does not
    have the folder stays where it is."""
    if folder and Path(folder).is_dir():
        os.chdir(folder)


def load_class(module: str, name: str, search_path: Sequence[str] = ()) -> Any:
    """Import ``module`` and return its class ``name`` without any ``@ray.remote``.

    Args:
        module: dotted name.
        name: of the class in it; dots go into nested classes.
        search_path: folders that are added to ``sys.path``.

    Raises:
        ClassNotFound: no such module or class, with the nearest name; the module's own error is the cause.
    """
    for folder in search_path:
        if folder not in sys.path:
            sys.path.append(folder)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ClassNotFound(f"module '{module}' cannot be imported: no module named '{error.name}'") from error
    except (Exception, SystemExit) as error:
        raise ClassNotFound(f"module '{module}' cannot be imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            classes = [key for key, value in vars(found).items() if isinstance(undecorated(value), type)]
            raise ClassNotFound(f"module '{module}' has no class '{name}'{hint(part, classes)}")
        found = getattr(found, part)
    found = undecorated(found)
    if not isinstance(found, type):
        raise ClassNotFound(f"'{module}.{name}' is a {type(found).__name__}, not a class")
    return found
