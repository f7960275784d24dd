"""The ``trainer_invocation`` decorator: how the trainer calls a workload's method."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dlrover.python.rl.common.nearest import hint

F = TypeVar("F", bound=Callable[..., Any])

_POLICY = "__trainer_invocation__"
_TARGETS = ("ALL", "RANK0")


@dataclass(frozen=True)
class InvocationPolicy:
    """How one method is called; see :func:`trainer_invocation`.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a value outside the documented ones.
    """

    blocking: bool = True
    is_async: bool = False
    timeout: float = 10
    target: str = "ALL"
    auto_shard: bool = True
    pre_func: Callable[..., Any] | None = None
    post_func: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("blocking", "is_async", "auto_shard"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"trainer_invocation({name}=...) takes True or False, not {getattr(self, name)!r}")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float):
            raise TypeError(f"trainer_invocation(timeout=...) takes seconds, not {self.timeout!r}")
        if not self.timeout > 0:
            raise ValueError(f"trainer_invocation(timeout=...) must be greater than 0 seconds, not {self.timeout!r}")
        if self.target not in _TARGETS:
            raise ValueError(
                f"trainer_invocation(target=...) takes 'ALL' or 'RANK0', not {self.target!r}"
                f"{hint(str(self.target), _TARGETS)}"
            )
        for name in ("pre_func", "post_func"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"trainer_invocation({name}=...) takes a function, not {function!r}")

    def replace(self, **options: Any) -> "InvocationPolicy":
        """This policy with some options changed; an unknown one is a TypeError with the nearest name."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in options:
            if name not in known:
                raise TypeError(f"trainer_invocation has no option '{name}'{hint(name, known)}")
        return dataclasses.replace(self, **options)


DEFAULT_POLICY = InvocationPolicy()


def trainer_invocation(**options: Any) -> Callable[[F], F]:
    """Say how the trainer calls this method of a workload. The method itself, async or not, is left as it is.

    Args:
        blocking: True waits for the results; False returns at once with pending results, which can be awaited,
            resolved with ``.result(timeout)``, or passed to another role group's call.
        is_async: with ``blocking=True``, wait at most ``timeout`` seconds for **every** member; late ranks are named in
            an :class:`~dlrover.python.rl.common.errors.InvocationTimeout` that holds what did arrive.
        timeout: seconds greater than 0, default 10; used when ``blocking`` and ``is_async`` are both True.
        target: ``"ALL"`` members, or ``"RANK0"`` alone (the result is a list of one).
        auto_shard: divide the arguments over the members by the rules of
            :mod:`~dlrover.python.rl.trainer.shard`; False copies them.
        pre_func: ``pre_func(*args, **kwargs)`` runs in the trainer before sharding; what it returns becomes the
            argument (a tuple: the arguments).
        post_func: ``post_func(results)`` runs in the trainer on the gathered results; what it returns is the call's
            value.

    Raises:
        TypeError: an unknown option (the nearest name is given) or one of the wrong type.
        ValueError: a value outside the documented ones.
    """
    policy = DEFAULT_POLICY.replace(**options)

    def decorate(method: F) -> F:
        setattr(method, _POLICY, policy)
        return method

    return decorate


def policy_of(method: Any) -> InvocationPolicy:
    """The policy a method was decorated with, or the defaults."""
    policy = getattr(method, _POLICY, DEFAULT_POLICY)
    return policy if isinstance(policy, InvocationPolicy) else DEFAULT_POLICY
