# SPDX-License-Identifier: Apache-2.0
"""Bugs in decisions: whose fault an error is, what restarts, which nodes are used, who hangs or is slow, who is where.

Others, which the simulation has to see, are in ``tests/simulation/mutations.py``.
"""

from bug import Bug

_EVENTS, _STATE, _MACHINE, _RECOVERY = (f"control/{name}.py" for name in ("events", "state", "machine", "recovery"))
_LIVENESS, _PLACEMENT = (f"control/{name}.py" for name in ("liveness", "placement"))

_DECISIONS = ("control/test_recovery.py", "control/test_machine.py")
_PLACES = (
    "control/test_placement.py",
    "control/test_placement_shares.py",
    "control/test_placement_standbys.py",
    "control/test_placement_of_any_job.py",
)

TESTS = {
    _EVENTS: (*_DECISIONS, "control/test_journal.py", "control/test_faults.py"),
    _STATE: ("control/test_members.py", *_DECISIONS, "control/test_resizing.py"),
    _MACHINE: (*_DECISIONS, "control/test_resizing.py"),
    _RECOVERY: _DECISIONS,
    _LIVENESS: ("control/test_liveness.py", "control/test_slow_members.py"),
    _PLACEMENT: _PLACES,
}

BUGS = {
    "a bug whose words name a device is the machine's": Bug(
        _EVENTS,
        "if fault is not CauseKind.UNKNOWN_ERROR and not isinstance(error, _BUGS):",
        "if fault is not CauseKind.UNKNOWN_ERROR:",
    ),
    "a link that a failed device has broken is at fault": Bug(
        _EVENTS,
        "    if _DEVICE.search(text):\n",
        "    if _DEVICE.search(text) and not _LINK.search(text):\n",
    ),
    "the same error with another address is tried again": Bug(
        _EVENTS,
        '_NUMBER.sub("#", self.message) == _NUMBER.sub("#", other.message)',
        "self.message == other.message",
    ),
    "secrets of a traceback are in the journal": Bug(_EVENTS, "redacted(valid_text(self.detail))", "self.detail"),
    "recoveries of last week make the back-off longer": Bug(
        _RECOVERY, "1 if last_s <= at_s - settings.window_s else before + 1", "before + 1"
    ),
    "losses of a day count as if they were of one window": Bug(
        _RECOVERY, "len(within(losses[node], settings.window_s, at_s)) >= limit", "len(losses[node]) >= limit"
    ),
    "the very first cause is not kept": Bug(_RECOVERY, "(causes[0], *causes[2:])", "causes[1:]"),
    "the last node in use is excluded after another one": Bug(
        _RECOVERY, '- {"", node, *state.excluded}', '- {"", node}'
    ),
    "nodes that lose processes slowly are excluded one after the other": Bug(
        _RECOVERY, " and len(state.excluded) < len(in_use)", ""
    ),
    "a node that is lost during a restart is used again": Bug(
        _RECOVERY,
        "    state = exclude(state, event.node)\n    if not state.phase.live:\n        return state, ()\n",
        "    if not state.phase.live:\n        return state, ()\n    state = exclude(state, event.node)\n",
    ),
    "a failure of a worker in init is the trainer's": Bug(
        _RECOVERY, "    if role in settings.roles and not state.opened:\n", "    if False:\n"
    ),
    "a worker keeps the process that an unknown error came from": Bug(
        _RECOVERY, "    if role in settings.roles and event.cause.kind is CauseKind.UNKNOWN_ERROR:\n", "    if False:\n"
    ),
    "a group that is lost again keeps its processes": Bug(_RECOVERY, " or role in state.streaks:", ":"),
    "ranks on an excluded node stay there": Bug(_RECOVERY, " and process.node not in state.excluded]", "]"),
    "ranks stay beside a device that has failed": Bug(
        _RECOVERY, "[] if kind in _IN_FRESH_PROCESSES else _rejoining_ranks(", "_rejoining_ranks("
    ),
    "the standby of a worker that is lost again is never free": Bug(
        _RECOVERY, "        if member.standby >= 0:\n", "        if False:\n"
    ),
    "a failure during a restart restarts again": Bug(
        _RECOVERY, " or (state.phase is Phase.RESTARTING and event.cause.retryable):", ":"
    ),
    "a lost standby holds its slot": Bug(_RECOVERY, "return state, (kill, *commands)", "return state, commands"),
    "the first commit is not noted": Bug(_MACHINE, "if state.committed and quiet:", "if quiet:"),
    "a job that is stopped before it is submitted runs": Bug(
        _MACHINE, "if isinstance(event, events.StopRequested):", "if False:"
    ),
    "a standby that becomes a worker is reported as free": Bug(
        _MACHINE, " or standby.phase is not StandbyPhase.STARTING:", ":"
    ),
    "a master that is back places on excluded nodes": Bug(
        _MACHINE, "return (Place(state.incarnation, state.excluded),)", "return (Place(state.incarnation),)"
    ),
    "a worker forgets when its process began": Bug(_MACHINE, "event.standby, event.born)", "event.standby)"),
    "a rank that stays takes a standby": Bug(_STATE, " if rank not in left_out)", ")"),
    "every start of a worker adds standbys": Bug(
        _STATE, "range(size - len(state.standbys.get(role, {})))", "range(size)"
    ),
    "changes of high ranks are those of low ones": Bug(
        _STATE, "ProcessId(role, number * _CHUNK + at) for at", "ProcessId(role, at) for at"
    ),
    "a rank that comes again has a number of the past": Bug(
        _MACHINE, "Member(state.retired.get(process_id, first))", "Member(first)"
    ),
    "a role shrinks under a trainer that has begun": Bug(_MACHINE, " or num < least or has_begun:", " or num < least:"),
    "a role may not have its least number": Bug(_MACHINE, "or num < least or", "or num <= least or"),
    "standbys of a resized role never start": Bug(_MACHINE, 'timer.startswith(f"{role}[")', "timer.startswith(role)"),
    "a role that has shrunk twice grows by one": Bug(_MACHINE, "max(state.wanted.get(role, 0), num + 1)", "num + 1"),
    "a process without a sign of life may take as long as its call": Bug(
        _LIVENESS, "max(min(limit_s, listening.silence_s),", "max(limit_s,"
    ),
    "the rank that is ahead is the odd one": Bug(
        _LIVENESS, "min(elsewhere, key=lambda sign: (sign.step,", "max(elsewhere, key=lambda sign: (sign.step,"
    ),
    "a worker is slow after slow windows that are not in a row": Bug(
        _LIVENESS, "if member.ratio > self.factor else 0", "if member.ratio > self.factor else member.windows"
    ),
    "a slow worker is found again and again": Bug(
        _LIVENESS, "member.windows == WINDOWS:", "member.windows >= WINDOWS:"
    ),
    "the local world size counts all nodes": Bug(
        _PLACEMENT, "resources[role], at, len(bundles))", "resources[role], at, len(members))"
    ),
    "a standby is beside rank 0": Bug(
        _PLACEMENT, "[*(index for index in around if index != first_node), first_node]", "around"
    ),
    "a group that names more than a device leaves less than none": Bug(
        _PLACEMENT, "(max(UNITS, -(-used // UNITS) * UNITS) - used)", "(UNITS - used)"
    ),
}
