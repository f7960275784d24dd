# SPDX-License-Identifier: Apache-2.0
"""Faults that struck, beside what the run's journal and commits say of them: when each was noticed and when healed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dlrover.python.rl.control.events import CauseKind
from tests.chaos.faults import HARMLESS, NODE_LOSSES, Kind
from tests.chaos.injector import Injected
from tests.chaos.ledger import Commit, Ledger, Loss, Up

_EARLY_S = 0.1
_NODE_WINDOW_S = 90.0
_START_WINDOW_S = 30.0
NOTHING = "(nothing)"


@dataclass(frozen=True)
class Finding:
    """A fault and what became of it, in seconds from then on."""

    fault: Injected
    noticed_s: float | None  # until the master noted the loss
    cause: str  # what it noted, or "(nothing)"
    back_s: float | None  # until the lost process was replaced
    commit_s: float | None  # until the next commit
    overlaps: bool = False  # it struck less than a second after another one that had not healed


def findings_of(faults: Sequence[Injected], ledger: Ledger, commits: Sequence[Commit]) -> list[Finding]:
    """Each fault with what became of it, in the order in which they struck."""
    findings: list[Finding] = []
    for fault in sorted(faults, key=lambda fault: fault.at_s):
        loss, back = _loss_and_return(fault, ledger)
        before = findings[-1] if findings else None
        healed_s = max(before.back_s or 0.0, before.commit_s or 0.0) if before else 0.0
        overlaps = before is not None and fault.at_s < before.fault.at_s + min(1.0, healed_s)
        returned_s = fault.back_s or (back.at_s if back else 0.0)
        noticed_s, cause = (loss.at_s - fault.at_s, loss.cause.kind.value) if loss else (None, NOTHING)
        back_s = returned_s - fault.at_s if returned_s else None
        commit_s = next((commit.at_s - fault.at_s for commit in commits if commit.at_s > fault.at_s), None)
        findings.append(Finding(fault, noticed_s, cause, back_s, commit_s, overlaps))
    return findings


def _loss_and_return(fault: Injected, ledger: Ledger) -> tuple[Loss | None, Up | None]:
    since_s = fault.at_s - _EARLY_S
    if fault.kind in NODE_LOSSES:
        # Whichever is noticed first: the node, or one of its processes.
        losses = [loss for loss in ledger.losses if loss.at_s > since_s and fault.node and loss.node == fault.node]
        return (losses[0] if losses else None), None
    if not fault.pid:
        return None, None
    if fault.who == "master":
        return None, next((up for up in ledger.starts if up.who == "master" and up.at_s > since_s), None)
    loss = next((loss for loss in ledger.losses if loss.pid == fault.pid and loss.at_s > since_s), None)
    if loss is None:
        return None, None
    after = (up for up in ledger.starts if up.who == loss.who and up.at_s >= loss.at_s and up.pid != fault.pid)
    return loss, next(after, None)


def false_alarms(faults: Sequence[Injected], ledger: Ledger) -> list[Loss]:
    """Losses that the master has noted and that no fault explains."""
    victims = {fault.pid for fault in faults if fault.pid and fault.kind not in HARMLESS}
    harmful = [fault for fault in faults if fault.kind not in HARMLESS]
    nodes = {fault.node: fault.at_s for fault in harmful if fault.kind in NODE_LOSSES}

    def explained(loss: Loss) -> bool:
        if loss.pid in victims and loss.pid:
            return True
        struck_s = nodes.get(loss.node)
        if struck_s is not None and 0 <= loss.at_s - struck_s + _EARLY_S < _NODE_WINDOW_S:
            return True
        # One that was still starting has no pid and no node: was its role hit, or the node that it was to be on?
        return not loss.pid and any(_may_be(fault, loss) for fault in harmful)

    return [loss for loss in ledger.real_losses() if not explained(loss)]


def _may_be(fault: Injected, loss: Loss) -> bool:
    if not 0 <= loss.at_s - fault.at_s + _EARLY_S < _NODE_WINDOW_S:
        return False
    if fault.kind in NODE_LOSSES:
        return loss.cause.kind is CauseKind.NODE_LOST
    return bool(fault.who) and _role(fault.who) == _role(loss.who) and loss.at_s - fault.at_s < _START_WINDOW_S


def _role(process: str) -> str:
    return process.partition("[")[0].removesuffix("-standby")


def lost_commits(commits: Sequence[Commit], faults: Sequence[Injected]) -> list[str]:
    """Name the commits before which the run fell back further than damage explains."""
    problems, newest, seen = [], -1, set[int]()
    damaged = Counter(fault.step for fault in faults if fault.kind in (Kind.FLIP_MEMORY, Kind.TEAR_MEMORY))
    for commit in commits:
        lost = sum(step >= commit.step for step in seen)
        if lost > sum(damaged[step] for step in range(commit.step, newest + 1)):
            message = f"step {commit.step} was committed again by epoch {commit.epoch} when {newest} was the newest"
            problems.append(message)
        newest = max(newest, commit.step)
        seen.add(commit.step)
    return problems
