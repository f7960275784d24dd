# SPDX-License-Identifier: Apache-2.0
"""The states that members write while they go on: commits follow from them once every member has written its state.

::

    commit of step    4                5               6               7
    files             calls 4          calls 5         calls 6         calls 7
    follows from      state 0, 1-3     state 4         state 4, 5      state 4, 5-6
                      '- all are asked for the state '- all have it
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.runtime.checkpoint.member_state import CommitAnswer
from dlrover.python.rl.runtime.checkpoint.storage.manifest import Manifest, Piece, step_and_epoch

_LOG = get_logger(__name__)


@dataclass
class Snapshots:
    """Those of one step at a time; ``at`` is its commit, None if none is under way."""

    at: Manifest | None = None
    states: Mapping[str, Piece] = field(default_factory=dict)
    """Of each process, once all are there, for the commit that takes note of it."""

    given_up: Manifest | None = None
    """The commit after which one member could not write its state."""

    still_written: bool = False
    """Another one still writes its own then."""

    seconds: float = 0.0
    """What they took from the calls of the slowest member."""

    def note(self, answers: Mapping[ProcessId, CommitAnswer]) -> None:
        """Of the members, to the request for another commit."""
        self.states = {}
        if self.at is None:
            return
        found = {member.file_name: answer.snapshot for member, answer in answers.items()}
        files = {name: each.file for name, each in found.items() if each.file is not None}
        if len(files) == len(found):
            self.states = {name: Piece(self.at.folder, file) for name, file in files.items()}
            self.seconds = max((each.seconds for each in found.values()), default=0.0)
        elif not all(each.file is not None or each.running for each in found.values()):
            _LOG.info("the states of step %d are not complete: others are written", self.at.step)
            self.at, self.given_up = None, self.at
            self.still_written = any(each.running for each in found.values())

    def commit_of_states(self, extra: Mapping[str, Any]) -> Manifest | None:
        """The commit after which the states are, with them instead of the calls up to there."""
        if self.at is None or not self.states:
            return None
        files = {name: piece.file for name, piece in self.states.items()}
        return replace(self.at, files={**self.at.files, **files}, earlier={}, extra=dict(extra))

    def earlier(self, name: str, before: Manifest) -> tuple[Piece, ...]:
        """What the calls after the commit ``before`` follow from."""
        pieces = before.pieces_of(name)
        if self.at is None or name not in self.states:
            return pieces
        return (self.states[name], *(piece for piece in pieces if _step_of(piece) > self.at.step))


def _step_of(piece: Piece) -> int:
    ids = step_and_epoch(piece.folder)
    return ids[0] if ids is not None else 0
