"""What Ray's errors mean, in the closed list of causes."""

from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, RayError, RayTaskError

from dlrover.python.rl.common.errors import PlacementTimeout, WorkloadStartError
from dlrover.python.rl.control.events import Cause, CauseKind
from dlrover.python.rl.runtime.executor import cause_of


class MemberGone(Exception):
    """A process of the job is gone; ``who`` it was, and Ray's error."""

    def __init__(self, who: str, error: RayError) -> None:
        super().__init__(who)
        self.who, self.error = who, error


def classify(error: Exception) -> Cause:
    """The cause that an exception of one of the executor's tasks amounts to."""
    if isinstance(error, MemberGone):
        return Cause(_death(error.error), error.who, _one_line(error.error), str(error.error))
    if isinstance(error, PlacementTimeout):
        return Cause(CauseKind.NO_RESOURCES, "job", str(error))
    inner = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(inner, WorkloadStartError):
        return cause_of(inner, inner.who)
    return Cause(CauseKind.INTERNAL, "job", f"{type(inner).__name__}: {inner}".splitlines()[0], str(error))


def _death(error: RayError) -> CauseKind:
    # Ray names the memory monitor in the text of an actor's death; its general advice mentions memory as well.
    if isinstance(error, OutOfMemoryError) or "running low on memory" in str(error):
        return CauseKind.OUT_OF_MEMORY
    if isinstance(error, NodeDiedError) or (isinstance(error, ActorDiedError) and "node has died" in str(error)):
        return CauseKind.NODE_LOST
    return CauseKind.PROCESS_DIED


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
