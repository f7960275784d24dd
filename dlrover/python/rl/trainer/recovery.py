"""What durable steps need from the place where the trainer runs: members that come back, and a store for commits.

``runtime`` supplies both; a trainer without them runs as well, and a loss then ends it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, InvocationError

MemberId: TypeAlias = tuple[str, int]
"""Role and rank."""


@dataclass(frozen=True)
class RestartInfo:
    """Why this process runs again.

    Attributes:
        count: restarts of the trainer or the whole job so far, those inside its process included; 0 the first time.
        reason: of the last one, one line; ``""`` the first time.
        step: the last committed step, 0 for none.
    """

    count: int = 0
    reason: str = ""
    step: int = 0


@dataclass(frozen=True)
class Renewed:
    """The members of a role as they are after a replacement.

    Attributes:
        role: the role.
        incarnations: rank to the incarnation that is called from now on, of every rank.
        handles: rank to its raw handle, of those that are new at least.
    """

    role: str
    incarnations: Mapping[int, int]
    handles: Mapping[int, Any]


@dataclass(frozen=True)
class RoleTraits:
    """What recovery must know of a role.

    Attributes:
        size: its members.
        stateful: whether they have state to commit and restore.
        together: whether their ranks meet in collectives, so that all restart when one is lost.
    """

    size: int
    stateful: bool = False
    together: bool = False


class Recovery(Protocol):
    """How lost members come back.

    Attributes:
        epoch: of this trainer's process, from 1.
        fresh: whether the members are as new; False: they hold what an earlier epoch did.
        restart_info: why this process runs; its ``step`` is filled in by the trainer.
    """

    epoch: int
    fresh: bool
    restart_info: RestartInfo

    def incarnations(self) -> Mapping[MemberId, int]:
        """The incarnation of each member that the port calls now."""
        ...

    def renew(self, role: str, rank: int, incarnation: int, why: str) -> Renewed:
        """Block until a later incarnation of the member, and of all others that had to restart with it, can be called;
        from then on the port calls them. Returns at once when that is so already. ``incarnation`` is the one found
        dead (0: unknown: what is called now is said); ``why`` is one line. Thread safe.

        Raises:
            JobFailed: there will be no replacement.
        """
        ...

    def opened(self) -> None:
        """The trainer has entered ``steps()``: losses are recovered from here on. Told once in each epoch."""
        ...

    def began(self, step: int) -> None:
        """The trainer has begun ``step``. Returns at once."""
        ...

    def progressed(self, step: int) -> None:
        """``step`` is committed. Returns at once."""
        ...


@dataclass(frozen=True)
class LastCommit:
    """The last commit that is known of, whether it is still there or not.

    Attributes:
        step: its step.
        incarnations: of each stateful member, the latest whose state was ever committed.
    """

    step: int
    incarnations: Mapping[MemberId, int]


class Checkpoints(Protocol):
    """Where commits are kept. What members are asked to do is a request that the trainer carries there unread."""

    def newest(self) -> int | None:
        """The step of the newest generation of which everything that can be seen from here is intact; damaged ones are
        set aside, each with a line in the log. None when the run has committed nothing.

        Raises:
            CheckpointMissing: there were generations, and none is left.
        """
        ...

    def last_known(self) -> LastCommit | None:
        """The last commit that is known of, None for none: tells members that hold a state from those that replaced
        them, also when all commits are gone."""
        ...

    def load(self, step: int) -> Mapping[str, Any]:
        """The trainer's state of the newest generation, which :meth:`newest` gave.

        Raises:
            CheckpointCorrupt, CheckpointMissing: it is not what was written.
        """
        ...

    def discard(self, step: int, why: str) -> None:
        """Set the generation of ``step`` aside for good: a member could not read its part."""
        ...

    def restore_request(self, step: int) -> Any:
        """What ``RESTORE`` carries: go back to ``step``."""
        ...

    def commit_request(self, step: int, last: bool) -> Any:
        """What ``COMMIT`` carries: write the state after ``step``. ``last``: no step follows."""
        ...

    def commit(self, step: int, answers: Mapping[MemberId, Any], state: Mapping[str, Any]) -> None:
        """Make ``step`` a generation of what the members answered and of the trainer's state.

        Raises:
            StaleEpoch: a later trainer has taken over.
        """
        ...

    def persist_request(self) -> Any:
        """What ``PERSIST`` carries: finish the copy to the job's directory that is under way. None: there is none."""
        ...

    def persisted(self, answers: Mapping[MemberId, Any]) -> None:
        """Every member has finished its part of that copy: publish it."""
        ...


def is_damage(error: BaseException) -> bool:
    """Whether ``error`` says that a commit is not there as it was written."""
    original = error.original if isinstance(error, InvocationError) else error
    return isinstance(original, CheckpointCorrupt | CheckpointMissing)
