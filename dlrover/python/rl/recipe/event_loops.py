"""Where the coroutines of a member run: in the thread that calls, or in one beside it."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from dlrover.python.rl.recipe.members import use_threads

T = TypeVar("T")

_JOIN_S, _CANCEL_S = 10.0, 1.0


class EventLoop(Protocol):
    """Runs coroutines that wait for each other."""

    beside: bool
    """Whether tasks go on while no call is made."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns, or raises."""
        ...

    def close(self) -> None:
        """Run nothing any more."""
        ...


class LoopHere:
    """Nothing moves but within calls, in the thread of the caller; tasks that are left over go on with the next one."""

    beside = False

    def __init__(self) -> None:
        self._loop = _StandingLoop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns, or raises."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(coroutine)
        return _in_thread(self._loop, coroutine)  # A notebook's cell runs in a loop, and a thread has one at most.

    def close(self) -> None:
        """Run nothing any more."""
        self.run(_end_all())
        self._loop.close()


class LoopBeside:
    """Tasks go on between calls, in a thread of their own.

    Args:
        threads: that the thread computes with; torch counts them for each thread.
    """

    beside = True

    def __init__(self, threads: int | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(threads,), name="rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns, or raises."""
        asked = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return asked.result()  # waits: as long as the call takes, which the trainer's limits bound

    def close(self) -> None:
        """Run nothing any more."""
        self.run(_end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _serve(self, threads: int | None) -> None:
        use_threads(threads)
        self._loop.run_forever()


class _StandingLoop(asyncio.SelectorEventLoop):
    """Its clock stands while it does not run: nobody's time is up who could not move."""

    def __init__(self) -> None:
        self._stood_s = 0.0
        self._since: float | None = None
        super().__init__()

    def time(self) -> float:
        """Seconds for which it has run, from an arbitrary beginning."""
        return (super().time() if self._since is None else self._since) - self._stood_s

    def run_forever(self) -> None:
        """Run until it is stopped."""
        if self._since is not None:
            self._stood_s += super().time() - self._since
            self._since = None
        try:
            super().run_forever()
        finally:
            self._since = super().time()

    def __del__(self) -> None:  # Workloads that nobody closes are let go in silence.
        if not self.is_closed():
            self.close()


async def _end_all() -> None:
    """Cancel the tasks that are left. One that hears of no cancellation is left behind."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=_CANCEL_S)


def _in_thread(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    outcome: list[T] = []
    raised: list[BaseException] = []

    def serve() -> None:
        try:
            outcome.append(loop.run_until_complete(coroutine))
        except BaseException as error:  # noqa: BLE001 - handed on to the caller
            raised.append(error)

    thread = threading.Thread(target=serve, name="rollouts")
    thread.start()
    thread.join()  # waits: as long as the call takes, which the trainer's limits bound
    if raised:
        raise raised[0]
    return outcome[0]
