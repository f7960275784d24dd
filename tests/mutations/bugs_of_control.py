# SPDX-License-Identifier: Apache-2.0
"""Bugs in decisions: whose fault an error is, what restarts, which nodes are used, who hangs or is slow, who is where,
and in the lines of the journal."""

from bug import Bug

_EVENTS, _STATE, _MACHINE, _RECOVERY = (f"control/{name}.py" for name in ("events", "state", "machine", "recovery"))
_LIVENESS, _PLACEMENT, _JOURNAL = (f"control/{name}.py" for name in ("liveness", "placement", "journal"))

_DECISIONS = ("control/test_recovery.py", "control/test_machine.py")
TESTS = {
    _EVENTS: (*_DECISIONS, "control/test_journal.py", "control/test_faults.py"),
    _STATE: ("control/test_scale.py", *_DECISIONS, "control/test_resizing.py"),
    _MACHINE: (*_DECISIONS, "control/test_resizing.py"),
    _RECOVERY: _DECISIONS,
    _LIVENESS: ("control/test_liveness.py",),
    _PLACEMENT: ("control/test_placement.py",),
    _JOURNAL: ("control/test_journal.py",),
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
    "changes of high ranks are made at low ones": Bug(
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
    "a loss of an older incarnation counts": Bug(
        _RECOVERY,
        "if not state.phase.live or member is None or member.incarnation != event.incarnation:",
        "if not state.phase.live or member is None:",
    ),
    "only a loss of an older incarnation counts": Bug(
        _RECOVERY, "member.incarnation != event.incarnation:", "member.incarnation <= event.incarnation:"
    ),
    "a loss of an older trainer counts": Bug(_RECOVERY, "state.epoch != event.epoch or ", ""),
    "an older trainer is heard": Bug(_MACHINE, "epoch == state.epoch and ", ""),
    "a start of an older incarnation counts": Bug(
        _MACHINE, "member is None or member.incarnation != event.incarnation:", "member is None:"
    ),
    "an older incarnation's resources count": Bug(
        _MACHINE, "event.incarnation != state.incarnation:", "event.incarnation > state.incarnation:"
    ),
    "a worker that waits can be lost": Bug(
        _RECOVERY, "    if member.phase is MemberPhase.WAITING:\n        return state, ()\n", ""
    ),
    "a second report of a start counts": Bug(
        _MACHINE, "    if member.phase is not MemberPhase.STARTING:\n        return state, ()\n", ""
    ),
    "a job that has ended continues": Bug(_MACHINE, "    if state.phase.terminal:\n        return state, ()\n", ""),
    "losses count in any phase": Bug(
        _STATE, "return self in (Phase.PLACED, Phase.RUNNING)", "return not self.terminal"
    ),
    "a worker keeps its number": Bug(
        _STATE, "return Member(self.incarnation + 1, ", "return Member(self.incarnation, "
    ),
    "the trainer keeps its number": Bug(
        _RECOVERY,
        "state = replace(state, epoch=state.epoch + 1, trainer=trainer)",
        "state = replace(state, trainer=trainer)",
    ),
    "a restart of the job keeps the trainer's number": Bug(_RECOVERY, "        epoch=state.epoch + 1,\n", ""),
    "a restart of the job keeps the workers' numbers": Bug(
        _RECOVERY,
        "MemberMap({process_id: member.next() for process_id, member in state.members.items()}),",
        "state.members,",
    ),
    "the job keeps its number": Bug(
        _MACHINE, "incarnation=state.incarnation + 1,", "incarnation=max(state.incarnation, 1),"
    ),
    "a master that comes back keeps the numbers of what was starting": Bug(
        _MACHINE, "if not state.phase.live or state.settings is None:", "if True:"
    ),
    "a master that comes back keeps the number of a trainer that was starting": Bug(
        _MACHINE, "    if state.trainer.phase is MemberPhase.STARTING:\n", "    if False:\n"
    ),
    "a master that comes back restarts a part of a group": Bug(
        _MACHINE, "if ranks and settings.scope is RecoveryScope.GROUP:", "if False:"
    ),
    "standbys share a number": Bug(
        _STATE,
        "next_standby={**state.next_standby, role: number + 1},",
        "next_standby={**state.next_standby, role: number},",
    ),
    "a group is recovered worker by worker": Bug(
        _RECOVERY,
        "if settings.roles[role].scope is RecoveryScope.GROUP:\n            state, more = _recover_group",
        "if False:\n            state, more = _recover_group",
    ),
    "a worker is recovered with its whole role": Bug(
        _RECOVERY,
        "if settings.roles[role].scope is RecoveryScope.GROUP:\n            state, more = _recover_group",
        "if True:\n            state, more = _recover_group",
    ),
    "the rest of a group is not ended": Bug(_RECOVERY, "return state, killed + commands", "return state, commands"),
    "the old trainer is not ended": Bug(_RECOVERY, "return state, (killed, *commands)", "return state, commands"),
    "a lost node takes only workers": Bug(_RECOVERY, "    if is_lost(state.trainer.process):\n", "    if False:\n"),
    "a lost node's workers are not coalesced": Bug(
        _RECOVERY, "_count(state.recoveries, role, len(ranks))", "_count(state.recoveries, role)"
    ),
    "a lost node's standbys are forgotten": Bug(
        _RECOVERY,
        "        if standby.phase is StandbyPhase.TAKING:\n            lost",
        "        if True:\n            continue\n            lost",
    ),
    "recovered by scope before steps are open": Bug(_RECOVERY, "if not state.opened or not lost:", "if not lost:"),
    "never recovered by scope": Bug(_RECOVERY, "if not state.opened or not lost:", "if True:"),
    "steps stay open over a restart of the job": Bug(_RECOVERY, "        opened=False,\n", ""),
    "a new trainer takes old workers for new": Bug(
        _RECOVERY, "Trainer(fresh=False, reason", "Trainer(fresh=True, reason"
    ),
    "a user's error is retried": Bug(_RECOVERY, "    elif not cause.retryable:\n", "    elif False:\n"),
    "back-offs outlive a restart of the job": Bug(
        _RECOVERY, "        waits={},\n        restarts_by", "        restarts_by"
    ),
    "a standby takes two places": Bug(
        _STATE, "state = replace(state, standbys={**state.standbys, role: {**pool, **used}})", "pass"
    ),
    "a standby that has taken over stays a standby": Bug(
        _MACHINE,
        "    if member.standby >= 0:\n        state = drop_standby",
        "    if False:\n        state = drop_standby",
    ),
    "a standby that dies as it takes over is not recovered": Bug(
        _RECOVERY, "    if standby.phase is StandbyPhase.TAKING:\n        rank", "    if False:\n        rank"
    ),
    "a standby that is starting takes over": Bug(
        _STATE, "if pool[number].phase is StandbyPhase.READY)", "if pool[number].phase is not StandbyPhase.TAKING)"
    ),
    "no standby takes over": Bug(_STATE, "if pool[number].phase is StandbyPhase.READY)", "if False)"),
    "standbys are tried for ever": Bug(_STATE, "return count >= STANDBY_TRIES", "return count < 0"),
    "standbys are not refilled": Bug(
        _MACHINE, "        return fill_standbys(state, event.role)\n", "        return state, ()\n"
    ),
    "one more restart than allowed": Bug(_RECOVERY, "if len(recent) >= limit:", "if len(recent) > limit:"),
    "one restart less than allowed": Bug(_RECOVERY, "if len(recent) >= limit:", "if len(recent) >= limit - 1:"),
    "the window never ends": Bug(
        _RECOVERY, "return tuple(time_s for time_s in times if time_s > at_s - window_s)", "return times"
    ),
    "a role's own limit is ignored": Bug(
        _RECOVERY, "        elif role.max_restart is not None:\n", "        elif False:\n"
    ),
    "no back-off": Bug(_RECOVERY, "if count < 2:", "if count > 0:"),
    "back-off at the first recovery": Bug(_RECOVERY, "if count < 2:", "if count < 1:"),
    "the back-off does not grow": Bug(_RECOVERY, "2.0 ** min(count - 2, MAX_DOUBLINGS)", "2.0 ** 0"),
    "the back-off has no end": Bug(_RECOVERY, "MAX_BACKOFF_S)\n\n", "1e9)\n\n"),
    "progress forgives nothing": Bug(
        _MACHINE,
        "replace(state, committed=event.step, streaks=streaks, first_cause=None, tried=())",
        "replace(state, committed=event.step)",
    ),
    "progress forgives all restarts": Bug(
        _MACHINE, "{subject: times[1:] for subject, times in recent.items() if len(times) > 1}", "{}"
    ),
    "a large role has the limit of a small one": Bug(
        _RECOVERY, " * (max(role.num, 1) if role.scope is RecoveryScope.MEMBER else 1)", ""
    ),
    "an unknown error is tried again for ever": Bug(
        _RECOVERY, "any(cause.is_like(earlier) for earlier in state.tried)", "False"
    ),
    "an unknown error is tried again beside its process": Bug(_RECOVERY, "if cause.kind in LEFT_ALIVE:", "if False:"),
    "the last cause is reported instead of the first": Bug(
        _RECOVERY, "first_cause=state.first_cause or cause", "first_cause=cause"
    ),
    "being ended for others is charged": Bug(_RECOVERY, "if cause.kind is CauseKind.PREEMPTED:", "if False:"),
    "a lost node is used again": Bug(_RECOVERY, "    state = exclude(state, event.node)\n", ""),
    "a node that keeps failing is used on": Bug(
        _RECOVERY, "    if not is_fast and len(losses[node]) < SLOW_FACTOR * limit:\n", "    if True:\n"
    ),
    "the only node is excluded": Bug(_RECOVERY, "if in_use and (is_fast or", "if (is_fast or"),
    "a node that loses processes slowly is used on": Bug(
        _RECOVERY, "(is_fast or stands_out)", "(is_fast and stands_out)"
    ),
    "nodes of a job that is at fault are excluded": Bug(_RECOVERY, ">= 2 * usual and", ">= 0 and"),
    "excluded nodes are forgotten by commands": Bug(
        _STATE,
        "return StartTrainer(state.epoch, state.trainer.fresh, state.epoch - 1, state.trainer.reason, state.excluded)",
        "return StartTrainer(state.epoch, state.trainer.fresh, state.epoch - 1, state.trainer.reason)",
    ),
    "nothing is released at the end": Bug(
        _RECOVERY, "return state, (Release(number, final=True),)", "return state, ()"
    ),
    "shared memory is left": Bug(
        _RECOVERY, "return state, (Release(number, final=True),)", "return state, (Release(number, final=False),)"
    ),
    "the answer to an earlier release ends the job": Bug(
        _RECOVERY,
        "number = state.incarnation + (state.phase is Phase.RESTARTING and not state.released)",
        "number = state.incarnation",
    ),
    "a stop changes the outcome": Bug(
        _MACHINE,
        "    if state.phase is Phase.ENDING:\n        return state, ()  # the outcome stays\n    return recovery.end",
        "    return recovery.end",
    ),
    "a release that is reported twice begins twice": Bug(
        _MACHINE, "if state.phase is not Phase.RESTARTING or state.released:", "if state.phase is not Phase.RESTARTING:"
    ),
    "a timer that is over goes off again": Bug(
        _MACHINE,
        "for timer, delay in state.waits.items() if timer != event.timer}",
        "for timer, delay in state.waits.items()}",
    ),
    "workers that start are not outstanding": Bug(
        _STATE,
        "        if starting := starting_ranks(state, role):\n            commands.append",
        "        if False:\n            commands.append",
    ),
    "back-offs are not outstanding": Bug(
        _STATE,
        "return (*commands, *(Wait(timer, delay_s) for timer, delay_s in state.waits.items()))",
        "return tuple(commands)",
    ),
    "standbys that start are not outstanding": Bug(
        _STATE, "        if standby.phase is StandbyPhase.STARTING\n    ]", "        if False\n    ]"
    ),
    "the trainer that starts is not outstanding": Bug(
        _STATE,
        "    if state.trainer.phase is MemberPhase.STARTING:\n        commands.append",
        "    if False:\n        commands.append",
    ),
    "a release is not outstanding": Bug(
        _MACHINE, "if state.phase is Phase.RESTARTING and not state.released:", "if False:"
    ),
    "events are written without their time": Bug(_JOURNAL, '"at_s": at_s,', '"at_s": 0.0,'),
    "checksums are not compared": Bug(_JOURNAL, 'if checksum != b"%08x" % zlib.crc32(body):', "if False:"),
    "a process comes back as a mapping": Bug(
        _JOURNAL,
        "    if is_dataclass(hint):\n        return _record(hint)\n",
        "    if is_dataclass(hint):\n        return lambda value: value if 'pid' in value else _record(hint)(value)\n",
    ),
    "an older format is read as this one": Bug(_JOURNAL, "if version != VERSION:", "if version is None:"),
    "a silent process is alive": Bug(_LIVENESS, "    if silent_s > max(", "    if False and silent_s > max("),
    "a call may take for ever": Bug(_LIVENESS, "if sign.method and age_s > limit_s:", "if False:"),
    "a listener that slept kills all": Bug(
        _LIVENESS,
        "silent_s = now_s - max(sign.at_s, listening.since_s)\n        #",
        "silent_s = now_s - sign.at_s\n        #",
    ),
    "idleness is a hang": Bug(_LIVENESS, "if sign.method and age_s > limit_s:", "if now_s - sign.since_s > 2.0:"),
}
