"""Reward functions found by name."""

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.common.nearest import hint, nearest


def load_function(name: str) -> Callable[..., Any]:
    """Import ``"package.module:function"``.

    Raises:
        VerifierError: no such module or function, with the nearest name; or it is no function.
    """
    module, _, path = name.partition(":")
    if not (module and path):
        raise VerifierError(f"'{name}' is not of the form 'package.module:function'")
    found: Any = load_module(module)
    for part in path.split("."):
        if not hasattr(found, part):
            known = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            raise VerifierError(f"module '{module}' has no function '{path}'{hint(part, known)}")
        found = getattr(found, part)
    if not callable(found):
        raise VerifierError(f"'{name}' is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def load_module(name: str) -> ModuleType:
    """Import ``"package.module"``.

    Raises:
        VerifierError: it cannot be imported, with the nearest name if there is none of this one.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        more = _nearest_module(missing) if name == missing or name.startswith(f"{missing}.") else ""
        raise VerifierError(f"module '{name}' cannot be imported: no module named '{missing}'{more}") from error
    except (Exception, SystemExit) as error:
        raise VerifierError(f"module '{name}' cannot be imported: {type(error).__name__}: {error}") from error


def _nearest_module(missing: str) -> str:
    """``missing`` lacks in a package that is there, or at the top: what stands beside it under a similar name."""
    package, _, last = missing.rpartition(".")
    places = getattr(importlib.import_module(package), "__path__", []) if package else None
    close = nearest(last, (module.name for module in pkgutil.iter_modules(places)))
    return f"; did you mean '{f'{package}.' if package else ''}{close}'?" if close else ""
