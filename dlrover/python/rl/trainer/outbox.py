"""How logged calls go out through the port beneath, and how their ends are waited for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlrover.python.rl.common.errors import StepAbandoned, WorkloadDied
from dlrover.python.rl.trainer.call_log import Entry, beneath
from dlrover.python.rl.trainer.port import RAW_CALL, STRAGGLER_LOG_INTERVAL_S, Call, Outcome, Port, Ref
from dlrover.python.rl.trainer.recovery import MemberId

GRACE_S = 5.0
"""How much longer the others are waited for when one of several calls has failed: where ranks meet in collectives, what
one of them raises may be the echo of another's death, which is about to show."""


@dataclass
class Outbox:
    """Sends calls through a port.

    Attributes:
        inner: that port.
        epoch: of the trainer.
        committed: the last committed step, None for none.
        closed: what a call is refused with, None while calls go out.
    """

    inner: Port
    epoch: int
    committed: int | None = None
    closed: StepAbandoned | None = None

    def issue(self, entry: Entry, sized: bool) -> Ref:
        """Send a call, for the first time or again, with what its refs stand for now."""
        if self.closed is not None:
            raise self.closed
        call = entry.call
        assert call is not None, "a call is forgotten only when nobody can need it"
        changed = replace(
            call,
            args=tuple(beneath(value) for value in call.args),
            kwargs={name: beneath(value) for name, value in call.kwargs.items()},
            sized=sized,
            epoch=self.epoch,
            committed=self.committed or 0,
            after=entry.after(),
        )
        return self.inner.submit(entry.role, entry.rank, changed)

    def ask(self, member: MemberId, verb: str, request: Any) -> Ref:
        """Send a question that is no call of a step."""
        args = () if request is None else (request,)
        call = Call(RAW_CALL, verb, args, {}, epoch=self.epoch, committed=self.committed or 0)
        return self.inner.submit(*member, call)

    def finish(self, runs: Sequence[Ref], patient: bool = False) -> list[Outcome]:
        """Wait until all have ended, or a member has died.

        Args:
            runs: what to wait for.
            patient: False: once one has failed, the others get only :data:`GRACE_S` without any news.
        """
        outcomes = [Outcome(late=True)] * len(runs)
        while late := [index for index, outcome in enumerate(outcomes) if outcome.late]:
            failed = not patient and any(outcome.error is not None for outcome in outcomes)
            found = self.inner.wait([runs[index] for index in late], GRACE_S if failed else STRAGGLER_LOG_INTERVAL_S)
            for index, outcome in zip(late, found, strict=True):
                outcomes[index] = outcome
            given_up = failed and all(outcome.late for outcome in found)
            if given_up or any(isinstance(outcome.error, WorkloadDied) for outcome in found):
                break
        return outcomes
