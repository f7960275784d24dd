"""How vLLM gives its device back and takes it again: by its own sleep on a GPU, by being started anew on a CPU."""

from collections.abc import Callable
from typing import Protocol

from dlrover.python.rl.engine.memory import Kind
from dlrover.python.rl.engine.vllm.runner import Runner
from dlrover.python.rl.engine.weights import WeightSnapshot, take_snapshot


class Resident(Protocol):
    """vLLM, awake or not.

    Attributes:
        keeps: whether there are weights that can be woken.
    """

    keeps: bool

    @property
    def runner(self) -> Runner:
        """The engine; only while weights and cache are there."""
        ...

    def wake(self, kind: Kind) -> None:
        """Bring the weights that were there or came last, or the cache, empty. Where it fails, all is asleep."""
        ...

    def sleep(self, keep: bool) -> None:
        """Free the device; ``keep``: the weights can be woken again."""
        ...

    def take(self, weights: WeightSnapshot) -> None:
        """New weights: in place, or kept until there is one."""
        ...

    def close(self) -> None:
        """End vLLM."""
        ...


class Sleeper:
    """vLLM's sleep mode, which its memory allocator for GPUs has: level 1 keeps the weights on the host, 2 does not."""

    def __init__(self, start: Callable[[], Runner]) -> None:
        self.runner = start()
        self.keeps = True
        self._asleep: set[Kind] = set()
        self._pending: WeightSnapshot | None = None

    def wake(self, kind: Kind) -> None:
        """Bring the weights that were there or came last, or the cache, empty."""
        try:
            self.runner.llm.wake_up(tags=[kind])
        except BaseException:
            self.runner.sleep_again()
            self._asleep = {"weights", "kv_cache"}
            raise
        self._asleep.discard(kind)
        if kind == "weights" and self._pending is not None:
            try:
                self.runner.take(self._pending)
            except BaseException:
                self.sleep(keep=False)  # they are a mixture
                raise
            self._pending = None

    def sleep(self, keep: bool) -> None:
        """Free the device. Weights that sleep already are not woken for it: somebody else may have their room."""
        if "weights" not in self._asleep:
            self.runner.llm.sleep(level=1 if keep else 2)
        else:
            if "kv_cache" not in self._asleep:
                self.runner.sleep_again()
            if not keep:
                self.runner.forget_copies()
        self._asleep = {"weights", "kv_cache"}
        self._pending = self._pending if keep else None
        self.keeps = self.keeps and keep

    def take(self, weights: WeightSnapshot) -> None:
        """New weights: in place, or kept until there is one."""
        if "weights" in self._asleep:
            self._pending = _copy(weights)
        else:
            self.runner.take(weights)
        self.keeps = True

    def close(self) -> None:
        """End vLLM."""
        self.runner.close()


class Restarter:
    """On a CPU vLLM cannot sleep. It is ended, and started anew when weights and cache are both wanted again.

    In between the weights are the last snapshot that came, of which a copy is kept for that; before the first they are
    those of the model's folder.
    """

    def __init__(self, start: Callable[[], Runner]) -> None:
        self._start = start
        self._runner: Runner | None = start()
        self._awake: set[Kind] = {"weights", "kv_cache"}
        self.keeps = True
        self._weights: WeightSnapshot | None = None

    @property
    def runner(self) -> Runner:
        """The engine; only while weights and cache are there."""
        assert self._runner is not None, "asked for while asleep"
        return self._runner

    def wake(self, kind: Kind) -> None:
        """Bring the weights that were there or came last, or the cache, empty."""
        self._awake.add(kind)
        if self.keeps and len(self._awake) == 2:
            try:
                self._restart(self._weights)
            except BaseException:
                self._awake = set()
                raise

    def sleep(self, keep: bool) -> None:
        """Free the device."""
        self._awake = set()
        if not keep:
            self._weights, self.keeps = None, False
        self.close()

    def take(self, weights: WeightSnapshot) -> None:
        """New weights: in place, or kept until there is one."""
        kept = _copy(weights)
        if self._runner is not None:
            self._runner.take(kept)
        elif len(self._awake) == 2:
            self._restart(kept)
        self._weights, self.keeps = kept, True

    def close(self) -> None:
        """End vLLM."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _restart(self, weights: WeightSnapshot | None) -> None:
        runner = self._start()
        try:
            if weights is not None:
                runner.take(weights)
        except BaseException:
            runner.close()
            raise
        self._runner = runner


def _copy(weights: WeightSnapshot) -> WeightSnapshot:
    """Bytes of its own: those that arrived may be another process's shared memory."""
    return take_snapshot(((name, weights.tensor(name)) for name in weights.buffers), weights.version)
