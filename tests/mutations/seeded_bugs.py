# SPDX-License-Identifier: Apache-2.0
"""Bugs to be put into the package, and the tests that must see them."""

import bugs_of_checkpoints
import bugs_of_control
import bugs_of_online_recipes
import bugs_of_run_folders
import bugs_of_the_master
import bugs_of_the_member_host
import bugs_of_the_service
import bugs_of_the_trainer
import bugs_of_weight_sync
from bug import Bug

_MASTERS = "../protocol/test_masters_simulation.py"

TESTS = {
    "trainer/durable.py": (
        "trainer/test_durable.py",
        "runtime/test_local_durable.py",
        "runtime/test_neighbours.py",
        "runtime/test_member_state.py",
    ),
    "trainer/call_log.py": ("trainer/test_durable.py", "runtime/test_local_durable.py"),
    "trainer/steps.py": (
        "trainer/test_trainer.py",
        "trainer/test_durable.py",
        "runtime/test_local_durable.py",
        "runtime/test_member_state.py",
    ),
    "trainer/trainer.py": ("trainer/test_trainer.py", "trainer/test_durable.py", "runtime/test_local_durable.py"),
    "trainer/role_group.py": ("trainer/test_role_group.py",),
    "trainer/port.py": ("trainer/test_role_group.py", "trainer/test_durable.py"),
    "runtime/member/host.py": ("runtime/test_host.py", "runtime/test_member_state.py", "runtime/test_local_durable.py"),
    "runtime/member/arguments.py": (
        "runtime/test_host.py",
        "runtime/test_local_port.py",
        "runtime/test_local_durable.py",
    ),
    "runtime/member/heartbeat.py": ("runtime/test_heartbeat.py",),
    "runtime/checkpoint/commits.py": ("runtime/test_commits.py", "runtime/test_member_state.py"),
    "runtime/checkpoint/code.py": ("runtime/test_inspection.py",),
    "runtime/checkpoint/member_state.py": (
        "runtime/test_member_state.py",
        "runtime/test_host.py",
        "runtime/test_commits.py",
        "runtime/test_other_members.py",
    ),
    "runtime/checkpoint/neighbours.py": ("runtime/test_neighbours.py", "runtime/test_runs.py"),
    "engine/training/redivide.py": ("engine/test_redivide.py",),
    "runtime/checkpoint/runs.py": ("runtime/test_commits.py", "runtime/test_runs.py"),
    "runtime/checkpoint/store.py": ("runtime/test_store.py", "runtime/test_commits.py"),
    "runtime/checkpoint/state_file.py": (
        "runtime/test_state_file.py",
        "runtime/test_store.py",
        "runtime/test_node_memory.py",
    ),
    "runtime/checkpoint/node_memory.py": ("runtime/test_node_memory.py",),
    "runtime/ray/executor.py": ("runtime/ray/test_ray_executor.py", "runtime/ray/test_member_actor.py", _MASTERS),
    "runtime/ray/processes/process_table.py": (
        "runtime/ray/test_process_table.py",
        "runtime/ray/test_ray_executor.py",
        "runtime/ray/test_member_actor.py",
        _MASTERS,
    ),
    "runtime/ray/placement.py": ("runtime/ray/test_reservations.py", "runtime/ray/test_ray_executor.py", _MASTERS),
    "runtime/ray/cluster/api.py": ("runtime/ray/test_reservations.py", _MASTERS),
    "master/process/rl_master.py": ("master/test_rl_master.py", _MASTERS),
    "master/process/hang_detector.py": ("master/test_hang_detector.py", _MASTERS),
}
"""The files of ``tests/unit`` that are run against a bug in a file of the package."""


_DURABLE, _LOG, _STEPS = "trainer/durable.py", "trainer/call_log.py", "trainer/steps.py"
_HOST, _ARGUMENTS, _BEATS = "runtime/member/host.py", "runtime/member/arguments.py", "runtime/member/heartbeat.py"
_MEMBER, _COMMITS = "runtime/checkpoint/member_state.py", "runtime/checkpoint/commits.py"
_RUNS, _NEIGHBOURS = "runtime/checkpoint/runs.py", "runtime/checkpoint/neighbours.py"
_STORE, _FILE = "runtime/checkpoint/store.py", "runtime/checkpoint/state_file.py"
_MEMORY = "runtime/checkpoint/node_memory.py"
_STRIDE, _CODE = "runtime/checkpoint/commits.py", "runtime/checkpoint/code.py"
_EXECUTOR, _TABLE = "runtime/ray/executor.py", "runtime/ray/processes/process_table.py"
_PARTS, _CLUSTER, _MASTER = (
    "engine/training/redivide.py",
    "runtime/ray/cluster/api.py",
    "master/process/rl_master.py",
)
_HANGS = "master/process/hang_detector.py"

BUGS = {
    # -- states that are written while the workers continue --
    "a step ends before the commit before is published": Bug(
        _STEPS,
        "            self._publish(waits=True)\n            if self._checkpoints is not None and is_due",
        "            if self._checkpoints is not None and is_due",
    ),
    "a commit is published before all states are written": Bug(
        _STEPS,
        "asks=True, waits=waits):\n                return False\n",
        "asks=True, waits=waits):\n                pending.copied = {}\n",
    ),
    "nothing is published while the trainer waits": Bug(
        _STEPS, "            self.port.publish = self._publish_if_idle\n", "            pass\n"
    ),
    "a busy worker is asked for its state": Bug(
        _STEPS, "        if self.port.are_idle(", "        if True or self.port.are_idle("
    ),
    "a second loop begins again": Bug(
        _STEPS, "            return self.port.ended\n", "            return self.port.committed or 0\n"
    ),
    "the last commit is not waited for": Bug(
        _STEPS, "        self._publish(waits=True)\n        if not self._is_open", "        if not self._is_open"
    ),
    "a rank goes back alone past an ended step": Bug(
        _DURABLE,
        "self.committed < self.ended and is_stateful:",
        "False:",
    ),
    "waits with a deadline never end": Bug(
        _DURABLE, "            timeout_s = None if timeout_s is None else timeout_s - pause_s\n", ""
    ),
    "a restored worker answers calls of its earlier state": Bug(
        _HOST, "        self._forget()\n        self._state.restore", "        self._state.restore"
    ),
    "the copy begins before the state is written": Bug(
        _MEMBER, "    writing.thread.join()  # waits: as finish does\n    source", "    source"
    ),
    "a trainer that waits gets no file": Bug(
        _MEMBER, "        if request.waits:\n            self.wait_until_written()\n", ""
    ),
    "a copy is begun at steps without one": Bug(
        _COMMITS,
        "        return self.stride.is_due(step) or last or step % self.every == 0",
        "        return self.stride.is_due(step) or last",
    ),
    "all engines are deterministic": Bug(
        _COMMITS, "        self.stride.deterministic = deterministic\n", "        self.stride.deterministic = True\n"
    ),
    "the stride begins again after each restart": Bug(
        _COMMITS, "        self.stride.start_after(newest.manifest.step if newest is not None else 0)\n", ""
    ),
    "commits take twice their share": Bug(_STRIDE, "_SHARE = 0.01", "_SHARE = 0.02"),
    "the share is of all time": Bug(
        _STRIDE, "math.ceil(self._commit_s / (_SHARE * self._step_s))", "math.ceil(self._commit_s / _SHARE)"
    ),
    "slow steps are eight apart": Bug(
        _STRIDE, "        most = min(_MOST_STEPS, int(_MOST_S / self._step_s))\n", "        most = _MOST_STEPS\n"
    ),
    "repeated steps count for the pace": Bug(
        _STRIDE, "        if self._at is not None and step == self._at[0] + 1:", "        if self._at is not None:"
    ),
    "what a module imports is not looked at": Bug(
        _CODE, '            _add_modules(_imports(source, name, files[0].stem == "__init__"), folders, modules)\n', ""
    ),
    "relative imports are of the wrong package": Bug(
        _CODE, "len(parts) - node.level + is_package", "len(parts) - node.level + 1"
    ),
    "an older commit has changed code": Bug(
        _CODE,
        '    if not before:\n        return ""\n',
        '    if not before:\n        before = {"modules": {}, "versions": {}}\n',
    ),
    "calls of an earlier version are a state": Bug(
        _STORE, '    if fields.pop("earlier", {}):', '    if fields.pop("earlier", {}) and False:'
    ),
    # -- durable calls ------------------------------------------------------------------------------------------------
    "a death that was told before is a new one": Bug(
        _DURABLE,
        "if 0 < death.incarnation < self._incarnations.get(ProcessId(death.role, death.rank), 0):",
        "if False:",
    ),
    "a new worker does not load the commit": Bug(_DURABLE, "if stateful and self.committed is not None:", "if False:"),
    "a new worker does not get the calls of the step": Bug(
        _DURABLE, "            if call.member in self._unbuilt:\n                self._repeat(call)", "            pass"
    ),
    "a new worker does not get the calls of init": Bug(
        _DURABLE, "[call for call in self.log.setup if call.member in self._unbuilt]", "[]"
    ),
    "a rebuilt worker is rebuilt again": Bug(_DURABLE, "        self._unbuilt.clear()\n", ""),
    "a repeated call that newly fails is ignored": Bug(
        _DURABLE, "if not call.end(run, error):", "if call.end(run, error) is None:"
    ),
    "an error of a call without a waiter is lost": Bug(
        _DURABLE, "if call.state is CallState.FAILED and call.error is not None:", "if False:"
    ),
    "a request is not sent again after a recovery": Bug(
        _DURABLE,
        "isinstance(error, errors.WorkloadDied)])\n                    continue\n",
        "isinstance(error, errors.WorkloadDied)])\n",
    ),
    "calls that took a lost result are not retried": Bug(
        _DURABLE, "        self._retry_all({**lost, **self._poll(self.log.all_calls())})", "        pass"
    ),
    "the source of a lost argument is not issued again": Bug(
        _DURABLE,
        "                self._issue_sources(call)\n            call.retry",
        "                pass\n            call.retry",
    ),
    "the echo of a death is a user's error": Bug(
        _DURABLE, "in self.inner.wait(questions, call_log.GRACE_S) if questions else ():", "in ():"
    ),
    "a late worker is not replaced": Bug(_DURABLE, "            self._recover({}, deaths)\n", ""),
    "a late call is issued again": Bug(_LOG, "if logged.rank in ranks or together", "if False"),
    "a damaged commit is not given up": Bug(
        _DURABLE, "            self.checkpoints.discard(self.committed, str(error.original))\n", ""
    ),
    "a commit keeps the log": Bug(_DURABLE, "            self.log.close_step()\n", ""),
    # -- the log ------------------------------------------------------------------------------------------------------
    "a replaced trainer object continues to call": Bug(_LOG, "if self.closed is not None:", "if False:"),
    "requests have no epoch": Bug(
        _LOG, "Call(RAW_CALL, verb, args, {}, epoch=self.epoch,", "Call(RAW_CALL, verb, args, {}, epoch=0,"
    ),
    "calls have no epoch": Bug(_LOG, "            self.epoch,\n", "            0,\n"),
    "a call waits for one that has failed": Bug(
        _LOG, "while before is not None and before.error is not None:", "while False:"
    ),
    "a call waits for none before it": Bug(_LOG, "            logged.predecessor_id(),\n", ""),
    "a failure that was passed on is raised again at the commit": Bug(
        _LOG, "            waiting += sources_of(call.call) if passed_on else []\n", ""
    ),
    "a failure stands for those that the trainer has not received": Bug(
        _LOG, "sources_of(call.call) if passed_on else []", "sources_of(call.call)"
    ),
    "a failure of one rank leaves the calls of others": Bug(_LOG, "list(calls if failed else ())", "list(failed)"),
    "before steps() a call after a failed argument fails": Bug(
        _DURABLE, "return isinstance(error, errors.CallSkipped)", "return False"
    ),
    "before steps() only one call after a failed argument is made again": Bug(
        _DURABLE, "self._retry_all({**lost, **{call", "self._retry_all({**lost} or {**{call"
    ),
    "workers are not told what is committed": Bug(
        _LOG, "            self.settled,\n            call", "            0,\n            call"
    ),
    "arguments may change before they are sent again": Bug(
        _LOG, "            return value.copy()\n", "            return value\n"
    ),
    "a step begins with the log of the last one": Bug(_LOG, "        self.step.clear()\n", ""),
    "results are not kept": Bug(
        _LOG, "for name, value in call.kwargs.items()}, keep=True)", "for name, value in call.kwargs.items()})"
    ),
    "an answer is lost with a replay": Bug(
        _LOG, "if self.state in (CallState.ANSWERED, CallState.RAISED):", "if self.state is CallState.RAISED:"
    ),
    "calls are retried for ever": Bug(
        _LOG, "return self.call is not None and self._retries < _MAX_RETRIES", "return self.call is not None"
    ),
    # -- steps --------------------------------------------------------------------------------------------------------
    "ranks that meet are not restored together": Bug(
        _STEPS, "if member in behind or member.role in roles]", "if worker in behind]"
    ),
    "a commit is not repeated after a recovery": Bug(
        _STEPS, "            if self.port.recoveries == recoveries:\n                break", "            break"
    ),
    "workers that are ahead keep their answers": Bug(
        _STEPS,
        "            self.port.ask(standings, FORGET)  # all: ranks that meet have to meet again\n",
        "            pass\n",
    ),
    "the last commit is not copied": Bug(
        _STEPS,
        "while (request := self._checkpoints.persist_request()) is not None:",
        "while (request := None) is not None:",
    ),
    "workers that hold a later state begin again": Bug(_STEPS, "        if survivors:\n", "        if False:\n"),
    "calls of two steps have the same ids": Bug(_STEPS, "        self.counter.open(step)\n", ""),
    "a damaged commit ends the trainer": Bug(
        _STEPS, "                if not is_damage(error):\n                    raise\n", "                raise\n"
    ),
    "the trainer's state is not loaded": Bug(
        _STEPS, "                run, left = load_state(self.state, saved)\n", "                run, left = '', ()\n"
    ),
    "a loop that was left continues after a restart": Bug(
        _STEPS, "                self._left = list(left) if run == self._checkpoints.run else []\n", ""
    ),
    "a loop that another run has left is over": Bug(_STEPS, " if run == self._checkpoints.run else []", ""),
    "a commit does not wait for the calls": Bug(
        _STEPS,
        "            recoveries = self.port.recoveries\n            self.port.settle()\n",
        "            recoveries = self.port.recoveries\n",
    ),
    "attempts are never forgiven": Bug(
        "trainer/trainer.py",
        "failures = counts if steps.commits else failures + counts",
        "failures = failures + counts",
    ),
    "attempts have no limit": Bug("trainer/trainer.py", "if failures > _MAX_ATTEMPTS or not", "if not"),
    "a number is given twice": Bug(
        "trainer/role_group.py",
        "            counter.count += 1\n",
        "",
    ),
    "each rank of a replica gives a result": Bug(
        "trainer/role_group.py",
        "settings.timeout if settings.is_async else None)[::replica]",
        "settings.timeout if settings.is_async else None)",
    ),
    "late ranks are left out": Bug(
        "trainer/port.py",
        "        if timeout_s is not None:\n            arrived",
        "        if timeout_s is not None:\n            return [each.value for each in outcomes]\n            arrived",
    ),
    # -- hosts --------------------------------------------------------------------------------------------------------
    "an earlier trainer is obeyed": Bug(_HOST, "if header.epoch and header.epoch < self._epoch:", "if False:"),
    "a call to an earlier incarnation runs": Bug(_HOST, "if 0 < header.incarnation < self._incarnation:", "if False:"),
    "a call to a later incarnation runs": Bug(_HOST, "if header.incarnation > self._incarnation:", "if False:"),
    "another method is answered": Bug(_HOST, "if method != header.method:", "if False:"),
    "a call of the past runs": Bug(_HOST, "if header.call_id < self._latest:", "if False:"),
    "a call runs before the one before it": Bug(
        _HOST, "if header.after is not None and header.after not in self._answers:", "if False:"
    ),
    "a kept result changes with the workload": Bug(_HOST, "Stored.of(result, own=True)", "Stored.of(result)"),
    "answers of init are dropped": Bug(
        _HOST, "self._drop(lambda step: step == 0 or step > ended)", "self._drop(lambda step: step > ended)"
    ),
    "answers are kept for ever": Bug(_HOST, "        self._drop(lambda step: step == 0 or step > ended)\n", ""),
    "a raw call leaves the state a commit's": Bug(
        _HOST,
        "        self._standing = replace(self._standing, since=None, at=None)\n        return",
        "        return",
    ),
    "a failed call is not remembered": Bug(_HOST, "            self._record(header, failure)\n", ""),
    "an error without its cause": Bug(_HOST, "        failure.original = failure.__cause__ = error\n", ""),
    "stored values share their memory": Bug(
        _ARGUMENTS, "tuple(memoryview(bytes(view)) if own else view for view in views)", "tuple(views)"
    ),
    "readers may write into what they share": Bug(
        _ARGUMENTS,
        "[memoryview(buffer.raw()).toreadonly() for buffer in buffers]",
        "[memoryview(buffer.raw()) for buffer in buffers]",
    ),
    # -- heartbeats ---------------------------------------------------------------------------------------------------
    "an answer does not renew the lease": Bug(
        _BEATS, "            reached_s = self._now_s()\n            if not is_current", "            if not is_current"
    ),
    "there is no lease": Bug(_BEATS, "if silent_s > self._settings.lease_s:", "if False:"),
    "a replaced process continues": Bug(_BEATS, "            if not is_current:\n", "            if False:\n"),
    # -- a worker's part of a commit ----------------------------------------------------------------------------------
    "a file of another worker is loaded": Bug(
        _MEMBER, '{**self._header, "rank": rank, "step": request.step}', '{"step": request.step}'
    ),
    "a node keeps all its commits": Bug(
        _MEMBER, "            store.drop_older(request.first_kept)\n", "            pass\n"
    ),
    "a node drops the last commit before the next": Bug(
        _MEMBER, "store.drop_older(request.first_kept)", "store.drop_older(request.step)"
    ),
    "another step's copy is used for the open one": Bug(
        _MEMBER, "        if copy is None or copy.step != copying:", "        if copy is None:"
    ),
    "what is being copied is removed by its worker": Bug(
        _MEMBER,
        "            store.pinned.add(request.copying)\n        if self._copy",
        "            pass\n        if self._copy",
    ),
    "a second source is not tried": Bug(
        _MEMBER,
        "            except (CheckpointCorrupt, CheckpointMissing) as error:\n                failure = error\n",
        "            except (CheckpointCorrupt, CheckpointMissing) as error:\n                raise error\n",
    ),
    # -- commits ------------------------------------------------------------------------------------------------------
    "a copy is published when one worker has it": Bug(_COMMITS, "if len(copies) == len(answers):", "if copies:"),
    "what is being copied is not pinned": Bug(_COMMITS, "            self._commits.pinned.add(step)\n", ""),
    "only the first place of a damaged commit is discarded": Bug(
        _COMMITS, "for generation in self._offered:", "for generation in self._offered[:1]:"
    ),
    "calls continue from a commit that was given up": Bug(
        _COMMITS, "self._newest, self._offered, self._at = None, [], None", "self._newest, self._offered = None, []"
    ),
    "the last step may have calls alone": Bug(
        _COMMITS, "due = step > 0 and (last or step % self.every == 0)", "due = step > 0 and step % self.every == 0"
    ),
    "a store out of reach ends a recovery that does not need it": Bug(
        _COMMITS, "            if newest is None:\n                raise\n", "            raise\n"
    ),
    "a commit with a file that the disk has lost is tried for ever": Bug(
        _COMMITS, "is_damaged = isinstance(self.store, CheckpointStore) and is_transient(error)", "is_damaged = False"
    ),
    "a copy has precedence over its commit": Bug(
        _COMMITS, "if beyond is not None and manifest.step <= beyond.manifest.step:", "if False:"
    ),
    "commits of an ended run go though they are ahead": Bug(
        _RUNS, "if newest_step(commits) <= newest_step(copies):", "if True:"
    ),
    # -- states that are written while the workers continue --
    "a call changes the state that is being written": Bug(
        _HOST, "            if not guards_state(type(self.workload), method):\n", "            if False:\n"
    ),
    "calls that change nothing wait for the state": Bug(
        _HOST, "            if not guards_state(type(self.workload), method):\n", "            if True:\n"
    ),
    "a process ends in the middle of writing its state": Bug(
        _HOST, "        self._state.wait_until_written()\n        try:\n", "        try:\n"
    ),
    "two states are written at once": Bug(
        _MEMBER, "        self.wait_until_written()\n        began_s", "        began_s"
    ),
    "a state that failed is one that runs": Bug(
        _MEMBER, "        if not is_running and writing.error is not None:\n            raise writing.error\n", ""
    ),
    "the next node gets no states": Bug(
        _NEIGHBOURS, "if neighbour is not None:\n            hosts", "if False:\n            hosts"
    ),
    # -- calls as values ----------------------------------------------------------------------------------------------
    # -- stores -------------------------------------------------------------------------------------------------------
    "an earlier trainer may write": Bug(_STORE, "        self._fence.check(epoch)\n        folder", "        folder"),
    "an earlier trainer may commit": Bug(_STORE, "            self._fence.claim(epoch)\n", ""),
    "damaged generations count as kept": Bug(
        _STORE, "if len(recent) < self.keep and self.valid(manifest, check_size):", "if len(recent) < self.keep:"
    ),
    "what is being copied is removed": Bug(
        _STORE, "if old and name not in needed and step not in self.pinned:", "if old and name not in needed:"
    ),
    "a commit of missing files counts": Bug(
        _STORE,
        "_files_here(manifest):\n                check_size(folder, file)\n            existing",
        "_files_here(manifest):\n                pass\n            existing",
    ),
    "the step decides instead of the order": Bug(
        _STORE,
        "key=lambda manifest: manifest.age",
        "key=lambda manifest: (manifest.step, manifest.epoch)",
    ),
    "a changed manifest is not read again": Bug(
        _STORE, "if manifest is None or before != version:", "if manifest is None:"
    ),
    "known manifests are kept for ever": Bug(
        _STORE,
        "for name, pair in self._manifests.items() if name in names}",
        "for name, pair in self._manifests.items()}",
    ),
    "files on other nodes are missing": Bug(_STORE, 'if file.node in ("", self._node)]', "if True]"),
    "a damaged generation stays in place": Bug(
        _STORE, "            self.quarantine(manifest.folder, str(error))  # does", "            pass  # does"
    ),
    "a manifest of another run counts": Bug(_STORE, "    if manifest.run != run:\n", "    if False:\n"),
    "a manifest in another's folder counts": Bug(_STORE, "    if manifest.folder != folder.name:\n", "    if False:\n"),
    "a flipped bit in a manifest is not seen": Bug(
        _STORE,
        "    if _sealed(json.dumps(fields, sort_keys=True, allow_nan=False).encode()) != content:",
        "    if False:",
    ),
    "a flipped bit in a state is not seen": Bug(_FILE, "    if checksum != _RESIDUE or nbytes", "    if nbytes"),
    "another file with a right checksum is taken": Bug(
        _FILE, "if expected is not None and _CRC.unpack(ending) != (expected.checksum,):", "if False:"
    ),
    "a state is not synced": Bug(
        _FILE, "            if durable:\n                file.flush()\n                os.fsync(file.fileno())\n", ""
    ),
    "a state has its name before it is whole": Bug(
        _FILE, 'temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")', "temporary = path"
    ),
    "the rest of an overwritten file stays": Bug(_FILE, "            file.truncate()\n", ""),
    "states can be read by others": Bug(_FILE, "partial(os.open, mode=0o600)", "partial(os.open, mode=0o644)"),
    "a folder of another user is used": Bug(_MEMORY, "    _check_own(root)\n    _warn", "    _warn"),
    "what is only in memory goes with its run": Bug(_MEMORY, "                _save(root)\n", "                pass\n"),
    "the memory of a living run is removed": Bug(
        _MEMORY, "not if_free) or not _is_held(root)", "not if_free) or run is None"
    ),
    # -- master and executor ------------------------------------------------------------------------------------------
    "unknown processes survive the master's return": Bug(
        _EXECUTOR, "[name for name in names if name not in entries]", "[]"
    ),
    "a standby is ready before it is made": Bug(
        _EXECUTOR,
        "        await answer_of(str(entry.process_id), ref, self._job.liveness.start_timeout_s)\n"
        "        emit(events.StandbyReady",
        "        emit(events.StandbyReady",
    ),
    "a worker is up before it is made": Bug(
        _EXECUTOR,
        "        await answer_of(str(process_id), ref, timeout_s)\n        entry.up = True",
        "        entry.up = True",
    ),
    "a predecessor is not ended": Bug(
        _EXECUTOR, "            self._detached.run(self._pool.end(former))\n", "            pass\n"
    ),
    "a lost process is not noticed after the master's return": Bug(
        _EXECUTOR,
        "            if entry.handle is None:\n                emit(entry.loss(",
        "            if entry.handle is None:\n                str(entry.loss(",
    ),
    "an adopted process is not watched": Bug(
        _EXECUTOR,
        "                self.reservations.nodes.add(entry.process.node)\n            self._watch(entry, emit)\n",
        "                self.reservations.nodes.add(entry.process.node)\n",
    ),
    "the death of a process is not noticed": Bug(
        _EXECUTOR,
        "            raise MemberGone(str(entry.process_id), await self._pool.cluster.until_ended(entry.handle))",
        "            await self._pool.cluster.until_ended(entry.handle)",
    ),
    "two processes have one slot": Bug(
        _TABLE,
        "return holder is None or holder.slot != slot or self._entries.get(holder.process_id) is not holder",
        "return True",
    ),
    "workers begin before the others are located": Bug(
        _TABLE,
        "        async with asyncio.timeout(timeout_s):\n            await self._gate_of[entry.process_id].wait()\n",
        "",
    ),
    "local ranks count over all nodes": Bug(
        _TABLE, "self._local_ranks[rank] = self._sizes[self._nodes[rank]]", "self._local_ranks[rank] = rank"
    ),
    "an earlier incarnation is heard": Bug(_HANGS, "return beat.number >= member.first", "return True"),
    "what is not up is watched": Bug(
        _HANGS, "        self._signs = {process_id: self._signs[process_id] for process_id in numbers}\n", ""
    ),
    "all ranks that wait for one hang": Bug(
        _HANGS, "settings.scope is RecoveryScope.GROUP and len(of_role) > 1:", "False:"
    ),
    "a master that was paused kills everybody": Bug(
        _HANGS, "            self._listening_since_s = now_s  # this", "            pass  # this"
    ),
    "a part of a group is ready": Bug(
        _MASTER, ".scope is RecoveryScope.GROUP and len(up) < len(group):\n", ".scope is None:\n"
    ),
    "the lost incarnation is its own replacement": Bug(
        _MASTER, "member.incarnation <= incarnation or", "member.incarnation < incarnation or"
    ),
    "a loss of another incarnation counts": Bug(_MASTER, "member.incarnation == incarnation and ", ""),
    "a job that ends replaces its workers": Bug(
        _MASTER, "    if state.phase is not Phase.RUNNING or state.settings is None:\n", "    if False:\n"
    ),
    "a change of a worker changes its former ones": Bug(
        "control/state.py",
        "chunk = changed[place] = list(self._chunk(process_id))",
        "chunk = changed[place] = list(self._chunk(process_id))[::-1]",
    ),
    "workers that are up are not counted again": Bug(
        "control/state.py", "            up += (member.phase is MemberPhase.UP) - (", "            up += 0 * ("
    ),
    "the trainer's part stays on its node": Bug(
        _NEIGHBOURS,
        "return [Transfer(on_node[neighbour][0], (roots,), content=Held(encode(manifest), content))]",
        "return []",
    ),
    "files of a lost node are not brought": Bug(
        _NEIGHBOURS, "if holders and nodes.get(member) not in having:", "if False:"
    ),
    "the oldest of what nodes hold is taken": Bug(_NEIGHBOURS, "if age > newest:", "if not best:"),
    "neighbours keep all commits": Bug(_NEIGHBOURS, "commits.drop_older(part.first_kept)", "pass"),
    "neighbours write new pages each time": Bug(
        _NEIGHBOURS, "commits.spare(folder / file.name) if part.start == 0 else None", "None"
    ),
    "a discarded commit comes again from a neighbour": Bug(
        _NEIGHBOURS, 'any(name.startswith(f"{manifest.folder}.") for name in store.damaged())', "False"
    ),
    "a commit that is lost is offered": Bug(
        _NEIGHBOURS, "if not everywhere.intersection(", "if None is everywhere.intersection("
    ),
    "a copy that did not arrive counts": Bug(
        "trainer/durable.py",
        "failed = {each for each, is_stored in zip(now, stored, strict=True) if not is_stored}",
        "failed = set()",
    ),
    "only the first part of a file travels": Bug("trainer/durable.py", "range(len(transfer.parts))", "range(1)"),
    "a replaced trainer continues": Bug(_DURABLE, "if isinstance(error, errors.StaleCall):", "if False:"),
    "neighbours need no room": Bug(
        "runtime/checkpoint/runs.py", "(_KEPT + 1) * most[0] + _KEPT * neighbours", "(_KEPT + 1) * most[0]"
    ),
    # -- other numbers of workers -------------------------------------------------------------------------------------
    "workers of another layout are left as they are": Bug(
        _MEMBER,
        "                raise\n            self._restore_other(workload, request, pieces)\n",
        "                raise\n",
    ),
    "parts are copied to where they were": Bug(
        _PARTS, "slice(low - own_start, high - own_start)", "slice(0, high - low)"
    ),
    "a part that no state has is left out": Bug(_PARTS, "    if missing:\n", "    if False:\n"),
    "copies of a part count twice": Bug(_PARTS, "            if start not in seen[name]:", "            if True:"),
    "moments stay as they were": Bug(_PARTS, "        if tensor.ndim or not part.ndim:\n", "        if False:\n"),
    # -- masters that were replaced ------------------------------------------------------------------------------------
    "a replaced master ends actors": Bug(_CLUSTER, '"start_actor", "kill_actor"', '"start_actor"'),
    "a master that is back forgets what was outstanding": Bug(
        _MASTER, "        for command in outstanding(self._state):\n", "        for command in ():\n"
    ),
    "a master that is back looks for nothing": Bug(
        _MASTER,
        "        alive = await self._executor.adopt(state, self._events.put_nowait)\n",
        "        alive = 0\n",
    ),
    "a full disk of the journal ends the job": Bug(
        _MASTER,
        "        return await self._patiently(partial(self.brain.handle_all, events))\n",
        "        return self.brain.handle_all(events)\n",
    ),
    "hangs are not looked for": Bug(_MASTER, "        self._spawn(self._watch_hangs())\n", ""),
    "a second resume begins again": Bug(
        _MASTER, "            if self._tasks:\n                return True\n            try:", "            try:"
    ),
    "lost nodes are not looked for": Bug(
        _MASTER, "        self._spawn(self._executor.watch_nodes(self._events.put_nowait))\n", ""
    ),
}

for _package in (
    bugs_of_run_folders,
    bugs_of_the_service,
    bugs_of_weight_sync,
    bugs_of_online_recipes,
    bugs_of_control,
    bugs_of_the_trainer,
    bugs_of_checkpoints,
    bugs_of_the_member_host,
    bugs_of_the_master,
):
    TESTS |= {file: tuple(dict.fromkeys((*TESTS.get(file, ()), *tests))) for file, tests in _package.TESTS.items()}
    BUGS |= _package.BUGS
