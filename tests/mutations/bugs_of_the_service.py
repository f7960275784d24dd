# SPDX-License-Identifier: Apache-2.0
"""Bugs in the job service: who may do what, what is saved before it is answered, and what a client may reach."""

from bug import Bug

_AUTH, _SERVER, _MANAGER = "service/auth.py", "service/server.py", "service/manager.py"
_LEDGER, _STORE = "service/jobs/ledger.py", "service/jobs/store.py"
_RUNNER, _SUBMITTED = "service/ray_runner.py", "service/jobs/submissions.py"

TESTS = {
    _AUTH: ("service/test_auth.py", "service/test_server.py"),
    _SUBMITTED: ("service/test_submissions.py", "service/test_server.py"),
    _SERVER: ("service/test_auth.py", "service/test_server.py"),
    _MANAGER: ("service/test_manager.py", "service/test_ledger.py"),
    _LEDGER: ("service/test_ledger.py", "service/test_manager.py"),
    _STORE: ("service/test_manager.py", "service/test_ledger.py"),
    _RUNNER: ("service/test_ray_runner.py",),
}

BUGS = {
    "anybody may operate a job of another owner": Bug(
        _AUTH,
        "self.check(AccessRole.SUBMIT if owner == self.name else AccessRole.ADMIN)",
        "self.check(AccessRole.SUBMIT)",
    ),
    "tokens are read once": Bug(_AUTH, "if (state.st_mtime_ns, state.st_ino) != self._seen:", "if not self._callers:"),
    "tokens that cannot be read stay valid": Bug(
        _AUTH, "                self._seen, self._callers = (-1, -1), {}\n", "                pass\n"
    ),
    "the group may read the tokens": Bug(_AUTH, "& 0o077", "& 0o007"),
    "a first start that was cut off blocks the next one": Bug(
        _AUTH,
        "            (folder / TOKEN).unlink(missing_ok=True)  # of a first start that was cut off\n",
        "",
    ),
    "two processes may write the tokens": Bug(_AUTH, "fcntl.flock(descriptor, fcntl.LOCK_EX)", "pass"),
    "a stream takes no place among the long calls": Bug(
        _SERVER, "                    if is_long:\n", "                    if False:\n"
    ),
    "an address that fails too often is not held back": Bug(
        _SERVER, "if self._failures.take(context", "if True or self._failures.take(context"
    ),
    "a caller has one call more than it may": Bug(
        _SUBMITTED, "if self._held[caller] >= self._most:", "if self._held[caller] > self._most:"
    ),
    "the address that failed first is forgotten, not the oldest": Bug(
        _SERVER, "self._left.pop(address, (self._burst, now_s))", "self._left.get(address, (self._burst, now_s))"
    ),
    "an address saves up failures": Bug(
        _SERVER, "min(left + (now_s - at_s) * self._per_s, self._burst)", "left + (now_s - at_s) * self._per_s"
    ),
    "clients need no certificate": Bug(
        _SERVER, "self.read_changed, self.client_ca is not None", "self.read_changed, False"
    ),
    "a new certificate is not read": Bug(_SERVER, "self.read() if self._contents() != self._seen else None", "None"),
    "what is not saved is answered": Bug(
        _MANAGER,
        "                await asyncio.sleep(_RETRY_S)\n                return\n",
        "                await asyncio.sleep(_RETRY_S)\n",
    ),
    "what the runner has seen is decided in another order": Bug(
        _MANAGER, "request for request in reversed(batch) if", "request for request in batch if"
    ),
    "events after the first page are left out": Bug(_MANAGER, "last if len(page) < _PAGE else page[-1].number", "last"),
    "an event is told twice": Bug(_MANAGER, "self._recent[after + 1 - self", "self._recent[after - self"),
    "a hard stop after a soft one is not passed on": Bug(_MANAGER, " or record.hard > before.hard\n", "\n"),
    "a cluster that is away is not looked at again": Bug(
        _MANAGER, "                continue\n            if capacity", "                return\n            if capacity"
    ),
    "a job that was starting is not taken up": Bug(
        _MANAGER,
        "            if record.phase.holds_resources:\n                await",
        "            if record.phase is JobPhase.RUNNING:\n                await",
    ),
    "a report of an earlier run counts": Bug(_LEDGER, " or record.run != seen.run", ""),
    "a job that is being stopped runs again": Bug(
        _LEDGER, "phase=record.phase if stays_stopping else seen.phase", "phase=seen.phase"
    ),
    "an owner queues one job more than it may": Bug(_LEDGER, "if own >= limits", "if own > limits"),
    "a token stands for two requests": Bug(_LEDGER, "if before.fingerprint != job.fingerprint:", "if False:"),
    "the newest run of a name is forgotten with an old one": Bug(
        _LEDGER,
        "            if self.newest.get(record.name) == run:\n                del self.newest[record.name]\n",
        "            self.newest.pop(record.name, None)\n",
    ),
    "a role that shrinks gives its places away": Bug(_LEDGER, "places[role] = max(before, num)", "places[role] = num"),
    "a job that never fits holds back others": Bug(
        _LEDGER,
        'waits[record.run] = f"the cluster has too little: {lack}"\n',
        'waits[record.run] = f"the cluster has too little: {lack}"\n            blocker = record.name\n',
    ),
    "a write may be lost with the power": Bug(_STORE, "PRAGMA synchronous = FULL", "PRAGMA synchronous = NORMAL"),
    "descriptions of ended jobs stay": Bug(_STORE, "[*ended, *gone]", "gone"),
    "a write that fails stays open": Bug(_STORE, 'self._writer.execute("ROLLBACK")', "pass"),
    "two services hold a folder": Bug(_STORE, "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),
    "the master of another run is followed": Bug(
        _RUNNER, "return status.run == job.run if status.run else", "return bool(status.run) or"
    ),
    "a run that had begun begins again": Bug(_RUNNER, "if revival or began:", "if revival:"),
    "jobs fail when the service's cluster is lost": Bug(
        _RUNNER, "while ended.phase is JobPhase.FAILED and lost_process():", "while False:"
    ),
}
