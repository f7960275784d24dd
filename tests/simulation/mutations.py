# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs: each a small, plausible mistake in the production source."""

from sim_modules import Mutation

MUTATIONS = {
    # -- whose event is it ----------------------------------------------------------------------------------------
    "a loss of an older incarnation counts": Mutation(
        "control.recovery",
        "if not state.phase.live or member is None or member.incarnation != event.incarnation:",
        "if not state.phase.live or member is None:",
    ),
    "only a loss of an older incarnation counts": Mutation(
        "control.recovery", "member.incarnation != event.incarnation:", "member.incarnation <= event.incarnation:"
    ),
    "a loss of an older trainer counts": Mutation("control.recovery", "state.epoch != event.epoch or ", ""),
    "an older trainer is heard": Mutation("control.machine", "epoch == state.epoch and ", ""),
    "a start of an older incarnation counts": Mutation(
        "control.machine", "member is None or member.incarnation != event.incarnation:", "member is None:"
    ),
    "an older incarnation's resources count": Mutation(
        "control.machine", "event.incarnation != state.incarnation:", "event.incarnation > state.incarnation:"
    ),
    "a worker that waits can be lost": Mutation(
        "control.recovery", "    if member.phase is MemberPhase.WAITING:\n        return state, ()\n", ""
    ),
    "a second report of a start counts": Mutation(
        "control.machine", "    if member.phase is not MemberPhase.STARTING:\n        return state, ()\n", ""
    ),
    "a job that has ended goes on": Mutation(
        "control.machine", "    if state.phase.terminal:\n        return state, ()\n", ""
    ),
    "losses count in any phase": Mutation(
        "control.state", "return self in (Phase.PLACED, Phase.RUNNING)", "return not self.terminal"
    ),
    # -- numbers ------------------------------------------------------------------------------------------------------
    "a worker keeps its number": Mutation(
        "control.state", "return Member(self.incarnation + 1, ", "return Member(self.incarnation, "
    ),
    "the trainer keeps its number": Mutation(
        "control.recovery",
        "state = replace(state, epoch=state.epoch + 1, trainer=trainer)",
        "state = replace(state, trainer=trainer)",
    ),
    "a restart of the job keeps the trainer's number": Mutation(
        "control.recovery", "        epoch=state.epoch + 1,\n", ""
    ),
    "a restart of the job keeps the workers' numbers": Mutation(
        "control.recovery",
        "MemberMap({process_id: member.next() for process_id, member in state.members.items()}),",
        "state.members,",
    ),
    "the job keeps its number": Mutation(
        "control.machine", "incarnation=state.incarnation + 1,", "incarnation=max(state.incarnation, 1),"
    ),
    "a master that comes back keeps the numbers of what was starting": Mutation(
        "control.machine", "if not state.phase.live or state.settings is None:", "if True:"
    ),
    "a master that comes back keeps the number of a trainer that was starting": Mutation(
        "control.machine", "    if state.trainer.phase is MemberPhase.STARTING:\n", "    if False:\n"
    ),
    "a master that comes back restarts a part of a group": Mutation(
        "control.machine", "if ranks and settings.scope is RecoveryScope.GROUP:", "if False:"
    ),
    "standbys share a number": Mutation(
        "control.state",
        "next_standby={**state.next_standby, role: number + 1},",
        "next_standby={**state.next_standby, role: number},",
    ),
    # -- recovery by scope --------------------------------------------------------------------------------------------
    "a group is recovered worker by worker": Mutation(
        "control.recovery",
        "if settings.roles[role].scope is RecoveryScope.GROUP:\n            state, more = _recover_group",
        "if False:\n            state, more = _recover_group",
    ),
    "a worker is recovered with its whole role": Mutation(
        "control.recovery",
        "if settings.roles[role].scope is RecoveryScope.GROUP:\n            state, more = _recover_group",
        "if True:\n            state, more = _recover_group",
    ),
    "the rest of a group is not ended": Mutation(
        "control.recovery", "return state, killed + commands", "return state, commands"
    ),
    "the old trainer is not ended": Mutation(
        "control.recovery", "return state, (killed, *commands)", "return state, commands"
    ),
    "a lost node takes only workers": Mutation(
        "control.recovery",
        "    if is_lost(state.trainer.process):\n",
        "    if False:\n",
    ),
    "a lost node's workers are not coalesced": Mutation(
        "control.recovery",
        "_count(state.recoveries, role, len(ranks))",
        "_count(state.recoveries, role)",
    ),
    "a lost node's standbys are forgotten": Mutation(
        "control.recovery",
        "        if standby.phase is StandbyPhase.TAKING:\n            lost",
        "        if True:\n            continue\n            lost",
    ),
    "recovered by scope before steps are open": Mutation(
        "control.recovery", "if not state.opened or not lost:", "if not lost:"
    ),
    "never recovered by scope": Mutation("control.recovery", "if not state.opened or not lost:", "if True:"),
    "steps stay open over a restart of the job": Mutation("control.recovery", "        opened=False,\n", ""),
    "a new trainer takes old workers for new": Mutation(
        "control.recovery", "Trainer(fresh=False, reason", "Trainer(fresh=True, reason"
    ),
    "a user's error is retried": Mutation("control.recovery", "    elif not cause.retryable:\n", "    elif False:\n"),
    "back-offs outlive a restart of the job": Mutation(
        "control.recovery", "        waits={},\n        restarts_by", "        restarts_by"
    ),
    # -- standbys -----------------------------------------------------------------------------------------------------
    "a standby takes two places": Mutation(
        "control.state",
        "state = replace(state, standbys={**state.standbys, role: {**pool, **used}})",
        "pass",
    ),
    "a standby that has taken over stays a standby": Mutation(
        "control.machine",
        "    if member.standby >= 0:\n        state = drop_standby",
        "    if False:\n        state = drop_standby",
    ),
    "a standby that dies taking over takes nobody along": Mutation(
        "control.recovery",
        "    if standby.phase is StandbyPhase.TAKING:\n        rank",
        "    if False:\n        rank",
    ),
    "a standby that is starting takes over": Mutation(
        "control.state",
        "if pool[number].phase is StandbyPhase.READY)",
        "if pool[number].phase is not StandbyPhase.TAKING)",
    ),
    "no standby takes over": Mutation("control.state", "if pool[number].phase is StandbyPhase.READY)", "if False)"),
    "standbys are tried for ever": Mutation("control.state", "return count >= STANDBY_TRIES", "return count < 0"),
    "standbys are not refilled": Mutation(
        "control.machine", "        return fill_standbys(state, event.role)\n", "        return state, ()\n"
    ),
    # -- budgets, back-off, nodes -----------------------------------------------------------------------------------
    "one more restart than allowed": Mutation(
        "control.recovery", "if len(recent) >= limit:", "if len(recent) > limit:"
    ),
    "one restart less than allowed": Mutation(
        "control.recovery", "if len(recent) >= limit:", "if len(recent) >= limit - 1:"
    ),
    "the window never ends": Mutation(
        "control.recovery", "return tuple(time_s for time_s in times if time_s > at_s - window_s)", "return times"
    ),
    "a role's own limit is ignored": Mutation(
        "control.recovery", "        elif role.max_restart is not None:\n", "        elif False:\n"
    ),
    "no back-off": Mutation("control.recovery", "if count < 2:", "if count > 0:"),
    "back-off at the first recovery": Mutation("control.recovery", "if count < 2:", "if count < 1:"),
    "the back-off does not grow": Mutation("control.recovery", "2.0 ** min(count - 2, MAX_DOUBLINGS)", "2.0 ** 0"),
    "the back-off has no end": Mutation("control.recovery", "MAX_BACKOFF_S)\n\n", "1e9)\n\n"),
    "progress forgives nothing": Mutation(
        "control.machine",
        "replace(state, committed=event.step, streaks=streaks, first_cause=None, tried=())",
        "replace(state, committed=event.step)",
    ),
    "progress forgives all restarts": Mutation(
        "control.machine", "{subject: times[1:] for subject, times in recent.items() if len(times) > 1}", "{}"
    ),
    "a large role has the limit of a small one": Mutation(
        "control.recovery", " * (max(role.num, 1) if role.scope is RecoveryScope.MEMBER else 1)", ""
    ),
    "an unknown error is tried again for ever": Mutation(
        "control.recovery", "any(cause.is_like(earlier) for earlier in state.tried)", "False"
    ),
    "an unknown error is tried again beside its process": Mutation(
        "control.recovery", "if cause.kind in LEFT_ALIVE:", "if False:"
    ),
    "the last cause is told instead of the first": Mutation(
        "control.recovery", "first_cause=state.first_cause or cause", "first_cause=cause"
    ),
    "being ended for others is charged": Mutation(
        "control.recovery", "if cause.kind is CauseKind.PREEMPTED:", "if False:"
    ),
    "a lost node is used again": Mutation("control.recovery", "    state = exclude(state, event.node)\n", ""),
    "a node that keeps failing is used on": Mutation(
        "control.recovery", "    if not is_fast and len(losses[node]) < SLOW_FACTOR * limit:\n", "    if True:\n"
    ),
    "the only node is excluded": Mutation("control.recovery", "if in_use and (is_fast or", "if (is_fast or"),
    "a node that loses processes slowly is used on": Mutation(
        "control.recovery", "(is_fast or stands_out)", "(is_fast and stands_out)"
    ),
    "nodes of a job that is at fault are excluded": Mutation("control.recovery", ">= 2 * usual and", ">= 0 and"),
    "excluded nodes are forgotten by commands": Mutation(
        "control.state",
        "return StartTrainer(state.epoch, state.trainer.fresh, state.epoch - 1, state.trainer.reason, state.excluded)",
        "return StartTrainer(state.epoch, state.trainer.fresh, state.epoch - 1, state.trainer.reason)",
    ),
    # -- the end ------------------------------------------------------------------------------------------------------
    "nothing is released at the end": Mutation(
        "control.recovery", "return state, (Release(number, final=True),)", "return state, ()"
    ),
    "shared memory is left": Mutation(
        "control.recovery",
        "return state, (Release(number, final=True),)",
        "return state, (Release(number, final=False),)",
    ),
    "the answer to an earlier release ends the job": Mutation(
        "control.recovery",
        "number = state.incarnation + (state.phase is Phase.RESTARTING and not state.released)",
        "number = state.incarnation",
    ),
    "a stop changes the outcome": Mutation(
        "control.machine",
        "    if state.phase is Phase.ENDING:\n        return state, ()  # the outcome stays\n    return recovery.end",
        "    return recovery.end",
    ),
    "a release that is told twice begins twice": Mutation(
        "control.machine",
        "if state.phase is not Phase.RESTARTING or state.released:",
        "if state.phase is not Phase.RESTARTING:",
    ),
    "a timer that is over goes off again": Mutation(
        "control.machine",
        "for timer, delay in state.waits.items() if timer != event.timer}",
        "for timer, delay in state.waits.items()}",
    ),
    # -- a master that comes back -----------------------------------------------------------------------------------
    "workers that start are not under way": Mutation(
        "control.state",
        "        if starting := starting_ranks(state, role):\n            commands.append",
        "        if False:\n            commands.append",
    ),
    "back-offs are not under way": Mutation(
        "control.state",
        "return (*commands, *(Wait(timer, delay_s) for timer, delay_s in state.waits.items()))",
        "return tuple(commands)",
    ),
    "standbys that start are not under way": Mutation(
        "control.state", "        if standby.phase is StandbyPhase.STARTING\n    ]", "        if False\n    ]"
    ),
    "the trainer that starts is not under way": Mutation(
        "control.state",
        "    if state.trainer.phase is MemberPhase.STARTING:\n        commands.append",
        "    if False:\n        commands.append",
    ),
    "a release is not under way": Mutation(
        "control.machine", "if state.phase is Phase.RESTARTING and not state.released:", "if False:"
    ),
    "an event that orders something is not written down": Mutation(
        "master.process.brain",
        "if after is not before]",
        "if after is not before and not commands]",
    ),
    "the state before the journal": Mutation(
        "master.process.brain",
        "        if lines:\n            self.store.append(*lines)\n        self.state = state\n",
        "        self.state = state\n        if lines:\n            self.store.append(*lines)\n",
    ),
    # -- the journal --------------------------------------------------------------------------------------------------
    "events are written without their time": Mutation("control.journal", '"at_s": at_s,', '"at_s": 0.0,'),
    "checksums are not compared": Mutation(
        "control.journal", 'if checksum != b"%08x" % zlib.crc32(body):', "if False:"
    ),
    "a process comes back as a mapping": Mutation(
        "control.journal",
        "    if is_dataclass(hint):\n        return _record(hint)\n",
        "    if is_dataclass(hint):\n        return lambda value: value if 'pid' in value else _record(hint)(value)\n",
    ),
    "an older format is taken for this one": Mutation(
        "control.journal", "if version != VERSION:", "if version is None:"
    ),
    "lines are not synced": Mutation(
        "runtime.checkpoint.journal_store",
        "                    _write(self._file, header, 0)\n                    os.fsync(self._file)\n",
        "                    _write(self._file, header, 0)\n",
    ),
    "a new journal gets its name before it is safe": Mutation(
        "runtime.checkpoint.journal_store",
        "            file.flush()\n            os.fsync(file.fileno())\n",
        "            file.flush()\n",
    ),
    "a journal's name is synced by its creator alone": Mutation(
        "runtime.checkpoint.journal_store",
        "        sync_folder(path.parent)\n        self._path",
        "        self._path",
    ),
    "half a line stays at the end": Mutation(
        "runtime.checkpoint.journal_store", "        os.ftruncate(self._file, journal.end)\n", ""
    ),
    "half a line stays after the disk was full": Mutation(
        "runtime.checkpoint.journal_store",
        "        os.ftruncate(self._file, self._end)\n        _write(self._file, self._header, 0)\n",
        "        _write(self._file, self._header, 0)\n",
    ),
    "a journal is written on after an error of its disk": Mutation(
        "runtime.checkpoint.journal_store", "            if self._suspect:\n", "            if False:\n"
    ),
    # -- who hangs ----------------------------------------------------------------------------------------------------
    "a silent process is alive": Mutation(
        "control.liveness", "    if silent_s > max(", "    if False and silent_s > max("
    ),
    "a call may take for ever": Mutation("control.liveness", "if sign.method and age_s > limit_s:", "if False:"),
    "a listener that slept kills everybody": Mutation(
        "control.liveness",
        "silent_s = now_s - max(sign.at_s, listening.since_s)\n        #",
        "silent_s = now_s - sign.at_s\n        #",
    ),
    "idleness is a hang": Mutation(
        "control.liveness", "if sign.method and age_s > limit_s:", "if now_s - sign.since_s > 2.0:"
    ),
}
