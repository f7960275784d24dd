# SPDX-License-Identifier: Apache-2.0
"""Files of commits on their way between the memories of nodes, from member to member."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dlrover.python.rl.common.errors import InvocationError
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.trainer.call_log import CallSender
from dlrover.python.rl.trainer.port import READ, STORE, WHERE, Checkpoints, Outcome, Ref, Standing, Transfer


@dataclass
class Transfers:
    """The transfers of a trainer. ``request`` sends, and returns the answers; it sends again after a recovery."""

    sender: CallSender
    request: Callable[[Callable[[], Sequence[Ref]]], list[Any]]
    nodes: dict[ProcessId, str] = field(default_factory=dict)

    def locate(self, standings: Mapping[ProcessId, Standing]) -> None:
        """Note where members are."""
        self.nodes.update({member: standing.node for member, standing in standings.items()})

    def make(self, transfers: Sequence[Transfer]) -> dict[Transfer, str]:
        """Returns the node of each that has arrived."""
        under_way = list(transfers)
        for number in range(max((len(each.parts) for each in transfers), default=0)):
            now = [each for each in under_way if number < len(each.parts)]
            stored = self.request(partial(self._send, now, number))
            failed = {each for each, is_stored in zip(now, stored, strict=True) if not is_stored}
            under_way = [each for each in under_way if each not in failed]
        return {each: self.nodes[each.target] for each in under_way}

    def bring(
        self, checkpoints: Checkpoints, new: Sequence[ProcessId], step: int | None, busy: Collection[ProcessId]
    ) -> InvocationError | None:
        """Bring the nodes of ``new`` members what they lack of the commit of ``step``, in the middle of a recovery;
        returns a failure. Members that are ``busy`` answer later."""
        outcomes = self.sender.finish([self.sender.ask(member, WHERE) for member in new])
        if failure := _failure_in(outcomes):
            return failure
        self.locate({member: outcome.value for member, outcome in zip(new, outcomes, strict=True)})
        nodes = dict(sorted(self.nodes.items(), key=lambda item: item[0] in busy))
        for transfer in checkpoints.transfers_to(step, new, nodes) if step is not None else ():
            for number in range(len(transfer.parts)):
                if failure := _failure_in(self.sender.finish(self._send([transfer], number))):
                    return failure
        return None

    def _send(self, transfers: Sequence[Transfer], number: int) -> list[Ref]:
        """The requests for one part of each."""
        runs = []
        for transfer in transfers:
            part, content = transfer.parts[number], transfer.content
            if transfer.source is not None:
                content = self.sender.ask(transfer.source, READ, part)
            runs.append(self.sender.ask(transfer.target, STORE, part, content))
        return runs


def _failure_in(outcomes: Sequence[Outcome]) -> InvocationError | None:
    return next((outcome.error for outcome in outcomes if outcome.error is not None), None)
