# SPDX-License-Identifier: Apache-2.0
"""Reward functions and environments by name: built-in names, entry points, modules, scripts."""

import asyncio
import ctypes
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from dlrover.python.rl.common.by_value import readable_name
from dlrover.python.rl.common.errors import ClassNotFound, EnvironmentFailed, VerifierError, user_traceback
from dlrover.python.rl.common.extensions import ExtensionPoint, load_module
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.environment.core.base import EnvironmentTraits, StepResult, validate_state, validate_step
from dlrover.python.rl.environment.core.messages import Message, State

_ABANDONED = "abandoned environment"

REWARDS = ExtensionPoint(
    "reward function",
    "dlrover_rl.rewards",
    {
        "exact": "dlrover.python.rl.environment.verifiers:exact",
        "gsm8k": "dlrover.python.rl.environment.verifiers:gsm8k",
        "math": "dlrover.python.rl.environment.verifiers.math_answers:math_equal",
        "math_equal": "dlrover.python.rl.environment.verifiers.math_answers:math_equal",
        "python_tests": "dlrover.python.rl.environment.verifiers.code:python_tests",
    },
    {
        "dlrover.python.rl.environment.math_answers:math_equal": "math_equal",
        "dlrover.python.rl.environment.code:python_tests": "python_tests",
    },
)

ENVIRONMENTS = ExtensionPoint(
    "environment",
    "dlrover_rl.environments",
    {
        "gem": "dlrover.python.rl.environment.core.gym_adapter:gem",
        "gymnasium": "dlrover.python.rl.environment.core.gym_adapter:gymnasium",
        "tools": "dlrover.python.rl.environment.core.tools:ToolEnvironment",
    },
    {
        "dlrover.python.rl.environment.worlds:gem": "gem",
        "dlrover.python.rl.environment.worlds:gymnasium": "gymnasium",
        "dlrover.python.rl.environment.tools:ToolEnvironment": "tools",
    },
)


def load_function(name: str) -> Callable[..., Any]:
    """Load a name of ``REWARDS`` or ``"package.module:function"``; raises VerifierError with the nearest name."""
    try:
        function = REWARDS.load(name)
    except ClassNotFound as error:
        raise VerifierError(str(error)) from error
    if not callable(function):
        raise VerifierError(f"'{readable_name(name)}' is {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


_CALLS = {"reset": ("extra_info",), "step": ("state", "action", "extra_info"), "close": ("extra_info",), "shutdown": ()}
"""The functions of an environment, and their positional arguments."""


def load_environment(where: str, options: Mapping[str, Any] | None = None) -> "UserEnvironment":
    """Load the environment ``where``.

    Args:
        where: a name of ``ENVIRONMENTS``; or ``path/to/script.py`` or ``package.module`` with functions
            ``step(state, action, extra_info)`` and optionally ``reset(extra_info)``, ``close(extra_info)``,
            ``shutdown()``, sync or async; with ``:Name``, a class with these methods (or an object).
        options: keyword arguments of the class.

    Raises:
        EnvironmentFailed: there is no such name, no ``step``, or a function has other arguments."""
    target = find_environment(where, options)
    if _is_made(target):
        try:
            target = target(**dict(options or {}))
        except Exception as error:
            fault = f"could not be created: {type(error).__name__}: {error}"
            raise EnvironmentFailed(f"{readable_name(where)} {fault}", user_traceback(error)) from error
    return UserEnvironment(target, readable_name(where))


def find_environment(where: str, options: Mapping[str, Any] | None = None) -> Any:
    """Return the module, object, class or factory of a name without calling it; raises EnvironmentFailed."""
    colon = ":" in ENVIRONMENTS.places().get(ENVIRONMENTS.current(where), where)
    target, where = load_named(ENVIRONMENTS, where), readable_name(ENVIRONMENTS.current(where))
    if _is_made(target):
        if fault := find_argument_fault(target, options or {}):
            raise EnvironmentFailed(f"{where} does not take its options: {fault}")
    elif options:
        reason = "is an object, which takes" if colon else "consists of functions, which take"
        raise EnvironmentFailed(f"{where} {reason} no options: {', '.join(options)}")
    if isinstance(target, type) or not _is_made(target):
        _check_step(target, where)
    return target


def load_named(point: ExtensionPoint, where: str, default: str = "") -> Any:
    """Return what a name of ``point``, or ``path/to/script.py`` or ``package.module`` with ``:name``, stands for: the
    module without a name, unless it has a ``default``. Raises EnvironmentFailed with the nearest name."""
    registered, where = point.places(), point.current(where)
    address = registered.get(where, where)
    place, colon, name = address.rpartition(":") if ":" in address else (address, ":" if default else "", default)
    try:
        target: Any = _script(Path(place).expanduser()) if place.endswith(".py") else load_module(place)
    except ClassNotFound as error:
        close = "" if "." in where or ":" in where else hint(where, registered)
        raise EnvironmentFailed(f"{error}{close}") from error
    if colon and not hasattr(target, name):
        names = [key for key in vars(target) if key[0] != "_"]
        raise EnvironmentFailed(f"{place} has no '{name}'{hint(name, names)}")
    return getattr(target, name) if colon else target


def _is_made(target: Any) -> bool:
    """Return True for a class or a factory function, which takes the options."""
    return isinstance(target, type) or (callable(target) and not hasattr(target, "step"))


def _check_step(target: Any, name: str) -> None:
    if not callable(getattr(target, "step", None)):
        names = [key for key in dir(target) if callable(getattr(target, key)) and not key.startswith("_")]
        raise EnvironmentFailed(f"{name} has no function 'step'{hint('step', names)}")
    for call, arguments in _CALLS.items():
        function = getattr(target, call, None)
        is_unbound = isinstance(target, type) and inspect.isfunction(inspect.getattr_static(target, call, None))
        positions = ("self", *arguments) if is_unbound else arguments
        if callable(function) and (fault := find_argument_fault(function, {}, *positions)):
            raise EnvironmentFailed(f"{name}: {call} is called with ({', '.join(arguments)}): {fault}")


def find_argument_fault(function: Callable[..., Any], named: Mapping[str, Any], *positions: str) -> str:
    """Return why ``function`` does not take these arguments, with the nearest name; "" if it does."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have no signature
        return ""
    try:
        signature.bind(*positions, **named)
    except TypeError as error:
        unknown = next((name for name in named if name not in signature.parameters), "")
        return f"{error}{hint(unknown[:100], signature.parameters) if unknown else ''}"
    return ""


def _script(path: Path) -> ModuleType:
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
    """The user's environment with async calls and checked results; its functions may be sync or absent."""

    def __init__(self, target: Any, name: str) -> None:
        self.name = name
        self._calls = {call: getattr(target, call) for call in _CALLS if callable(getattr(target, call, None))}
        _check_step(target, name)
        self.traits = EnvironmentTraits.of(target)

    async def reset(self, extra_info: dict[str, Any]) -> State | None:
        state = await self._call("reset", extra_info)
        return None if state is None else validate_state("the state that reset returned", state)

    async def step(self, state: State, action: str | Message, extra_info: dict[str, Any]) -> StepResult:
        answer = await self._call("step", state, action, extra_info)
        return validate_step(answer, extra_info, needs_state=False)

    async def close(self, extra_info: dict[str, Any]) -> None:
        await self._call("close", extra_info)

    async def shutdown(self) -> None:
        await self._call("shutdown")

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await call_async(self._calls[name], *arguments) if name in self._calls else None


async def call_async(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call an async function here and others in a separate thread, so that a function that hangs blocks no other."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(*arguments)
    returned = await run_in_thread(function, *arguments)
    return await returned if inspect.isawaitable(returned) else returned


async def run_in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run in a daemon thread; SystemExit interrupts an abandoned call at its next line of Python."""
    outcome: Future[Any] = Future()
    outcome.set_running_or_notify_cancel()  # a cancelled call is interrupted instead
    lock, has_returned = threading.Lock(), False

    def run() -> None:
        nonlocal has_returned
        value: Any = None
        error: BaseException | None = None
        try:
            value = function(*arguments)
        except BaseException as raised:  # noqa: BLE001 - passed to the caller; others end its loop, or a future refuses
            is_usual = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if is_usual else RuntimeError(f"{type(raised).__name__}: {raised}")
        with lock:
            has_returned = True
        outcome.set_exception(error) if error is not None else outcome.set_result(value)

    thread = threading.Thread(target=run, name="environment", daemon=True)
    future = asyncio.wrap_future(outcome)
    thread.start()
    try:
        return await future  # waits: for the user's function, until the guard's deadline
    except asyncio.CancelledError:
        with lock:  # later another thread may have its number
            if not has_returned:
                thread.name, number = _ABANDONED, ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))
        raise


def count_abandoned() -> int:
    """Count the abandoned calls of this process that have not returned."""
    return sum(thread.name == _ABANDONED for thread in threading.enumerate())
