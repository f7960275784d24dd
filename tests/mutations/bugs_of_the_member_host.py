# SPDX-License-Identifier: Apache-2.0
"""Bugs in the host of a worker, in the actor around it, and in the table of a run's processes."""

from bug import Bug

_HOST, _ARGUMENTS, _BEATS = "runtime/member/host.py", "runtime/member/arguments.py", "runtime/member/heartbeat.py"
_LOADING, _FILES = "runtime/member/loading.py", "runtime/run/files.py"
_INTERRUPTS, _HEALTH = "runtime/interrupts.py", "runtime/run/machine.py"
_MEMBER, _ACTORS, _TABLE = (
    "runtime/ray/processes/member.py",
    "runtime/ray/processes/actors.py",
    "runtime/ray/processes/process_table.py",
)
_PORT = "runtime/ray/processes/port.py"

TESTS = {
    _BEATS: ("runtime/test_heartbeat.py",),
    _LOADING: (
        "control/test_faults.py",
        "runtime/test_local_port.py",
        "runtime/test_result_files.py",
        "config/test_secrets.py",
    ),
    _INTERRUPTS: ("runtime/test_interrupts.py",),
    _FILES: ("runtime/test_result_files.py", "master/test_jobs_elsewhere.py"),
    _HEALTH: ("runtime/test_run_machine.py", "runtime/ray/test_cluster_health.py"),
    _MEMBER: ("runtime/ray/test_member_actor.py",),
    _ACTORS: ("runtime/ray/test_process_table.py", "config/test_secrets.py"),
    _PORT: ("runtime/ray/test_ray_port.py", "runtime/torchrun/test_links.py"),
}

BUGS = {
    "a failed call of a worker with state is tried again": Bug(
        _HOST,
        "if header.epoch > self._epoch and not is_stateful(type(self.workload)):",
        "if header.epoch > self._epoch:",
    ),
    "two calls that failed cannot be tried again": Bug(
        _HOST,
        "                del self._answers[last]\n            self._latest = max(self._answers, default=_NEVER)\n",
        "                del self._answers[last]\n",
    ),
    "a method that exits ends the worker": Bug(
        _HOST, "except (Exception, SystemExit, asyncio.CancelledError) as error:", "except Exception as error:"
    ),
    "an error that can be sent but not received is sent": Bug(
        _HOST, "cloudpickle.loads(cloudpickle.dumps(error))", "cloudpickle.dumps(error)"
    ),
    "a workload that fails to close stays": Bug(
        _HOST,
        "        finally:\n            self.end()",
        "        except MemoryError:\n            pass\n        self.end()",
    ),
    "a call that makes progress ages": Bug(_HOST, "max(now[2], self._progressed_s)", "now[2]"),
    "a call without progress is no work": Bug(_HOST, "self.work.units + max(units, 1)", "self.work.units + units"),
    "a state of the last commit does not agree with it": Bug(
        _HOST, "if at is None or at < ended:", "if at is None or at <= ended:"
    ),
    "a worker that has done a step has not touched it": Bug(
        _HOST, "if header.call_id[0] > self._standing.touched:", "if header.call_id[0] > self._standing.settled + 1:"
    ),
    "a worker that goes back forgets init": Bug(
        _HOST, "        self._drop(lambda step: step == 0)\n", "        self._answers = {}\n"
    ),
    "each call has its own event loop": Bug(
        _HOST,
        "            if self._loop is None:\n                self._loop = asyncio.Runner()\n"
        "            return self._loop.run(_awaited(result))",
        "            return asyncio.run(_awaited(result))",
    ),
    "a list of values and results is sent as it is": Bug(
        _ARGUMENTS, "isinstance(value, list) and any(", "isinstance(value, list) and all("
    ),
    "a worker is not told what is committed": Bug(_ARGUMENTS, "incarnation, call.settled,", "incarnation, 0,"),
    "heartbeats do not count the kernel's kills": Bug(
        _BEATS, "replace(self._observe(), oom_kills=count_oom_kills())", "self._observe()"
    ),
    "the log of an earlier process with the same pid is shown": Bug(
        _BEATS, "newest = max(folder.glob(pattern)", "newest = min(folder.glob(pattern)"
    ),
    "a second SIGTERM is a notice, too": Bug(
        _BEATS, "        signal.signal(number, self._before or signal.SIG_DFL)\n", ""
    ),
    "each death is one by the OOM killer": Bug(
        _BEATS, "self._now[process.host]) <= before:", "self._now[process.host]) < before:"
    ),
    "a host without a count has had no kills": Bug(
        _BEATS, "process is not None and count >= 0:", "process is not None:"
    ),
    "a full disk of a worker is an unknown error": Bug(
        _LOADING, "kind = _kind_of(error.original) if", "kind = fault_of(error.original) if"
    ),
    "a device that fails while a workload starts ends the job": Bug(
        _LOADING, "        failure.fault = fault_of(error).value\n", ""
    ),
    "a trainer that has lost its master is the user's fault": Bug(
        _LOADING, "isinstance(error, errors.JobFailed | errors.MasterLost):", "isinstance(error, errors.JobFailed):"
    ),
    "a line is copied before it ends": Bug(
        _FILES,
        'whole = data.rfind(b"\\n") + 1 or (len(data) if is_last or len(data) == _COPIED else 0)',
        "whole = len(data)",
    ),
    "a source that was rotated is not copied on": Bug(_FILES, "offset = 0  # it was rotated", "pass"),
    "secrets are in the logs of the folder": Bug(_FILES, "file.write(redacted_bytes(data))", "file.write(data)"),
    "the output of a living process is copied twice": Bug(
        _FILES,
        'record["host"] != socket.gethostname() or process_began(record["pid"])',
        'record["host"] != socket.gethostname()',
    ),
    "a rotation loses the older logs": Bug(_FILES, "range(KEPT_LOGS - 1, 0, -1)", "range(1, KEPT_LOGS)"),
    "a second SIGTERM interrupts the exit handlers": Bug(
        _INTERRUPTS, "    signal.signal(number, signal.SIG_IGN)\n    raise", "    raise"
    ),
    "a run under nohup ends with its terminal": Bug(
        _INTERRUPTS, "if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:", "if True:"
    ),
    "private files in a folder are served": Bug(
        _FILES, "for part in parts for pattern in _PRIVATE", "for part in parts[:1] for pattern in _PRIVATE"
    ),
    "a check that crashes finds a good device": Bug(
        _HEALTH, "    if done.returncode:\n        lines", "    if done.returncode > 0:\n        lines"
    ),
    "secrets of a process are not hidden in its output": Bug(_LOADING, "    hide_values(secrets.values())\n", ""),
    "devices have the numbers of the node": Bug(
        _MEMBER, "visible.index(name) if name in visible else int(name)", "int(name)"
    ),
    "a worker that is asked for its secrets ends": Bug(
        _MEMBER, "return answer is not BeatAnswer.REPLACED", "return answer is BeatAnswer.CURRENT"
    ),
    "a process that stayed refuses calls to any incarnation": Bug(
        _MEMBER, "if 0 < incarnation <= self._left:", "if incarnation <= self._left:"
    ),
    "a result from beside a lost peer is used": Bug(
        _MEMBER,
        "        finally:\n            self._refuse_gone(header.incarnation, header.method)",
        "        finally:\n            pass",
    ),
    "an idle worker does not say that its node goes": Bug(
        _MEMBER, "Heartbeat(process_id, number, notice=notice, work=work)", "Heartbeat(process_id, number, work=work)"
    ),
    "a user's setting of NCCL's watchdog is lost": Bug(
        _MEMBER, "os.environ.setdefault(*WITHOUT_WATCHDOG)", "os.environ.update([WITHOUT_WATCHDOG])"
    ),
    "a raw call reaches a worker that is not rebuilt": Bug(
        _MEMBER, "if self._left and (self._host is None or not self._host.is_rebuilt):", "if False:"
    ),
    "secrets of a role are in the environment that Ray shows": Bug(
        _ACTORS, "spec = seal(job)[0].workloads[role]", "spec = job.workloads[role]"
    ),
    "a kill by the memory monitor is a plain death": Bug(
        _ACTORS,
        'isinstance(died, exceptions.OutOfMemoryError) or "running low on memory" in str(died)',
        "isinstance(died, exceptions.OutOfMemoryError)",
    ),
    "what could not be ended is not tried again": Bug(
        _ACTORS, "                await asyncio.sleep(_PAUSE_S)\n", "                return\n"
    ),
    "a start that was cancelled is not waited for": Bug(
        _ACTORS, "return await asyncio.shield(work)", "return await work"
    ),
    "a trainer's failure hides the worker that caused it": Bug(
        _TABLE, 'if self.process_id != TRAINER_ID or cause.who == "job":', "if True:"
    ),
    "a new process has the name of the one that did not leave": Bug(
        _TABLE,
        "self.handle, self.slot, self.standby, self.born, self.former = None, -1, -1, 0, None",
        "self.handle, self.slot, self.standby, self.former = None, -1, -1, None",
    ),
    "a process that stays is not ended with the run": Bug(
        _TABLE, "if (process := entry.located) is not None]", "if (process := entry.process) is not None]"
    ),
    "a broken connection to the trainer is its success": Bug(
        _TABLE, "                await asyncio.sleep(_ASK_AGAIN_S)\n", "                return None\n"
    ),
    "workers close before the trainer has ended": Bug(
        _TABLE, "        await self.end_named(trainers)\n        members", "        members"
    ),
    "a second start of a process finds its name taken": Bug(
        _TABLE, "        await self.end_named([name])  # a master that died may have started it\n", ""
    ),
    "a worker goes to a slot without a place": Bug(
        _TABLE,
        "next((slot for slot in free if slot not in lacking), free[0] if free else preferred)",
        "free[0] if free else preferred",
    ),
    "workers of another role count on a node": Bug(_TABLE, "if peer.process_id.pool == pool]", "if peer.is_member]"),
    "an adopted process that stayed has another name": Bug(
        _TABLE, "slot, member.standby, born, process=member.process)", "slot, member.standby, process=member.process)"
    ),
    "a busy worker with a broken connection is given up": Bug(
        _PORT, "return True  # the ping has arrived", "return False  # the ping has arrived"
    ),
    "an error of a device leaves the worker": Bug(
        _PORT, "    if fault in (CauseKind.DEVICE_FAILED, CauseKind.LINK_FAILED):\n", "    if False:\n"
    ),
}
