"""Environments found by name: a script or module with ``step``, or a class in one."""

import asyncio
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from dlrover.python.rl.common.errors import EnvironmentFailed, VerifierError
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.environment.base import StepResult, state_text, step_result
from dlrover.python.rl.environment.lookup import load_module

_CALLS = ("reset", "step", "close", "shutdown")


def load_environment(where: str, options: Mapping[str, Any] | None = None) -> "UserEnvironment":
    """The environment that a name stands for.

    Args:
        where: ``path/to/script.py`` or ``package.module``, whose functions it is made of: ``step(state, action,
            extra_info)``, and if wanted ``reset(extra_info)``, ``close(extra_info)`` and ``shutdown()``, each of them
            async or not. With ``:Name`` behind it, a class with these methods (or an object).
        options: keyword arguments of that class.

    Raises:
        EnvironmentFailed: there is no such thing, or it has no ``step``.
    """
    target = find_environment(where, options)
    if _is_made(target):
        try:
            target = target(**dict(options or {}))
        except Exception as error:
            raise EnvironmentFailed(f"{where} could not be made: {type(error).__name__}: {error}") from error
    return UserEnvironment(target, where)


def find_environment(where: str, options: Mapping[str, Any] | None = None) -> Any:
    """What a name stands for, without making it: a module, an object, or what makes one.

    Raises:
        EnvironmentFailed: there is no such thing, it has no ``step``, or does not take the options.
    """
    place, colon, name = where.rpartition(":") if ":" in where else (where, "", "")
    target: Any = _script(Path(place).expanduser()) if place.endswith(".py") else _module(place)
    if colon:
        if not hasattr(target, name):
            known = [key for key in vars(target) if key[0] != "_"]
            raise EnvironmentFailed(f"{place} has no '{name}'{hint(name, known)}")
        target = getattr(target, name)
    if _is_made(target):
        _check_options(where, target, options or {})
    elif options:
        what = "is an object, which takes" if colon else "is made of functions, which take"
        raise EnvironmentFailed(f"{where} {what} no options: {', '.join(options)}")
    if isinstance(target, type) or not _is_made(target):
        _check_step(target, where)
    return target


def _is_made(target: Any) -> bool:
    """Whether it is called with the options: a class, or a function."""
    return isinstance(target, type) or (callable(target) and not hasattr(target, "step"))


def _check_step(target: Any, name: str) -> None:
    if not callable(getattr(target, "step", None)):
        known = [key for key in dir(target) if callable(getattr(target, key)) and not key.startswith("_")]
        raise EnvironmentFailed(f"{name} has no function 'step'{hint('step', known)}")


def _check_options(where: str, maker: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):  # Some written in C say nothing of themselves.
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        known = list(signature.parameters)
        unknown = [name for name in options if name not in known]
        close = hint(unknown[0], known) if unknown else ""
        raise EnvironmentFailed(f"{where} does not take its options: {error}{close}") from error


def _module(name: str) -> ModuleType:
    try:
        return load_module(name)
    except VerifierError as error:
        raise EnvironmentFailed(str(error)) from error


def _script(path: Path) -> ModuleType:
    """The module of a script, which may import its neighbours."""
    path = path.resolve()
    name = f"environment_{blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        close = [file.name for file in path.parent.glob("*.py")]
        raise EnvironmentFailed(f"no such file: {path}{hint(path.name, close)}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "it ends with .py"
    assert spec.loader is not None, "it is a file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise EnvironmentFailed(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


class UserEnvironment:
    """An environment made of what the user wrote: async or sync calls, results as dicts; checked.

    Args:
        target: what has ``step`` and, if wanted, ``reset``, ``close``, ``shutdown`` and the number ``episodes``.
        name: for messages.

    Attributes:
        episodes: how many it serves at a time (``episodes`` of the target); None: any number.

    Raises:
        EnvironmentFailed: there is no ``step``.
    """

    def __init__(self, target: Any, name: str) -> None:
        self.name = name
        self._calls = {call: getattr(target, call) for call in _CALLS if callable(getattr(target, call, None))}
        _check_step(target, name)
        self.episodes: int | None = getattr(target, "episodes", None)

    async def reset(self, extra_info: dict[str, Any]) -> str | None:
        """The first state, or None where the user's code leaves that to the row's prompt."""
        if "reset" not in self._calls:
            return None
        state = await called(self._calls["reset"], extra_info)
        return None if state is None else state_text("the state that reset returned", state)

    async def step(self, state: str, action: str, extra_info: dict[str, Any]) -> StepResult:
        """The answer to an action, checked.

        Raises:
            EnvironmentFailed: the user's function returned something else.
            Exception: what it raises.
        """
        return step_result(await called(self._calls["step"], state, action, extra_info), extra_info)

    async def close(self, extra_info: dict[str, Any]) -> None:
        """End an episode."""
        if "close" in self._calls:
            await called(self._calls["close"], extra_info)

    async def shutdown(self) -> None:
        """Release everything."""
        if "shutdown" in self._calls:
            await called(self._calls["shutdown"])


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it here if it is async, else in a thread of its own: one that hangs must not take another's place."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(*arguments)
    returned = await in_thread(function, *arguments)
    return await returned if inspect.isawaitable(returned) else returned


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns, from a daemon thread: one that is given up on takes no other's place, and does not
    keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(value)

    def run() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = function(*arguments)
        except StopIteration as stop:  # No future takes this one.
            error = RuntimeError(f"StopIteration: {stop}")
        except Exception as raised:  # noqa: BLE001 - handed on to whoever waits
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return await future  # waits: for the user's function, as long as the guard around it allows
