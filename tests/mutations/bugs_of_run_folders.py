# SPDX-License-Identifier: Apache-2.0
"""Bugs in who holds the folder of a run, in how a run continues there, and in the supervisor."""

from bug import Bug

_FOLDER, _MACHINE = "runtime/run/folder.py", "runtime/run/machine.py"
_SAVED, _SUPERVISOR = "master/client/resume.py", "master/client/supervisor.py"

TESTS = {
    _FOLDER: (
        "runtime/test_run_folder.py",
        "runtime/test_other_members.py",
        "master/test_saved_run.py",
        "master/test_rl_master.py",
        "master/test_local_run.py",
        "master/test_run_folders.py",
        "master/test_jobs_elsewhere.py",
    ),
    _MACHINE: ("runtime/test_run_folder.py",),
    _SAVED: (
        "master/test_saved_run.py",
        "master/test_local_run.py",
        "master/test_run_folders.py",
        "master/test_jobs_elsewhere.py",
    ),
    _SUPERVISOR: ("master/test_saved_run.py",),
}

BUGS = {
    "a second process of a run takes the folder of the first": Bug(
        _FOLDER, "owner.run == job.run and not owner.pid)", "owner.run == job.run)"
    ),
    "a resumption takes the folder of a living run": Bug(
        _FOLDER,
        '    if in_use(folder):\n        return f"{folder} is in use by {owner}"\n'
        '    if job.checkpoint.resume == "latest" or job.overwrite:\n        return ""\n',
        '    if job.checkpoint.resume == "latest" or job.overwrite:\n        return ""\n'
        '    if in_use(folder):\n        return f"{folder} is in use by {owner}"\n',
    ),
    "files of results are not noticed": Bug(
        _FOLDER, "any(path.is_dir() or path.stat().st_size for", "any(path.is_dir() for"
    ),
    "a claim that fails keeps the folder": Bug(
        _FOLDER, "record.unlink(missing_ok=True)  # the earlier owner's record remains", "pass"
    ),
    "a claim removes its own record too": Bug(
        _FOLDER, "if number_of(older) < number_of(record):", "if number_of(older) <= number_of(record):"
    ),
    "the newest runs are removed": Bug(_FOLDER, "sorted(ended, reverse=True)[", "sorted(ended)["),
    "one run more than keep_runs is removed": Bug(
        _FOLDER, "[job.checkpoint.keep_runs :]", "[job.checkpoint.keep_runs - 1 :]"
    ),
    "the commits of a living run are removed": Bug(
        _FOLDER,
        "if not in_use(record.parent) and record.parent != job.job_dir]",
        "if record.parent != job.job_dir]",
    ),
    "a master that is back with overwrite removes its own commits": Bug(
        _FOLDER, "if is_fresh and (earlier is None or earlier.run != job.run):", "if is_fresh:"
    ),
    "an overwritten run stays in memory": Bug(_FOLDER, "(*STATES, SPANS)), *memory):", "(*STATES, SPANS)),):"),
    "a beat does not touch the record": Bug(_FOLDER, "            os.utime(self.record)\n", ""),
    "a beat does not see who took the folder": Bug(
        _FOLDER, "if newest is not None and newest != self.record:", "if newest is None:"
    ),
    "a run that fails after a commit loses its description": Bug(
        _FOLDER, "self.replaced and not self._has_committed():", "self.replaced:"
    ),
    "a run that is interrupted seems to run on": Bug(
        _FOLDER,
        "    except BaseException:\n        claimed.end(FAILED)",
        "    except Exception:\n        claimed.end(FAILED)",
    ),
    "the link to the last run depends on the working directory": Bug(
        _FOLDER, "link.symlink_to(folder.name)", "link.symlink_to(folder)"
    ),
    "a process with the number of a dead owner is the owner": Bug(
        _FOLDER, "return process_began(owner.pid) == owner.began", 'return process_began(owner.pid) != ""'
    ),
    "a zombie holds its folder": Bug(_MACHINE, 'state in "ZX"', 'state in "X"'),
    "a lease is compared with this machine's clock": Bug(
        _FOLDER, "probe.stat().st_mtime - record.stat()", "time.time() - record.stat()"
    ),
    "a disk that does not answer gives the folder away": Bug(
        _FOLDER, "return True  # a disk", "return False  # a disk"
    ),
    "record 9 is newer than record 10": Bug(_FOLDER, "folder.glob(RECORDS), key=number_of)", "folder.glob(RECORDS))"),
    "another command continues with the last run": Bug(_FOLDER, "owner.given == job.description_digest and ", ""),
    "the same command continues with a finished run": Bug(_FOLDER, " and owner.state != FINISHED:\n", ":\n"),
    "a description here hides the one of the object store": Bug(
        _FOLDER,
        'archived or (path.read_text(encoding="utf-8") if path.is_file() else "")',
        '(path.read_text(encoding="utf-8") if path.is_file() else "") or archived',
    ),
    "a saved run is where the latest one will be": Bug(
        _SAVED, "SavedRun(folder.resolve(), owner)", "SavedRun(folder, owner)"
    ),
    "a resumption may have another folder": Bug(_SAVED, r'r"\+*(name|job_dir)="', r'r"\+*(name)="'),
    "the model that a user names is not evaluated": Bug(
        _SAVED, "[*changes, *reference, *overrides]", "[*overrides, *changes, *reference]"
    ),
    "an evaluation has a name that is too long": Bug(_SAVED, "63 - len(_EVALUATION)", "63"),
    "changed code is not named": Bug(_SAVED, 'if changes else ""', 'if False else ""'),
    "a lost owner is waited for less than its lease": Bug(_SAVED, "owner.lease_s + run_folder.BEAT_S", "BEAT_S"),
    "losses with commits between them count in a row": Bug(
        _SUPERVISOR, "losses + 1 if step == last_step else 1", "losses + 1"
    ),
    "a job may be begun again once less than it may": Bug(
        _SUPERVISOR, "if losses > job.restart", "if losses >= job.restart"
    ),
    "the next attempt overwrites what the last one committed": Bug(
        _SUPERVISOR, "run=new_run(), overwrite=False,", "run=new_run(),"
    ),
    "an interrupted job is begun again": Bug(
        _SUPERVISOR, "            if interrupts:\n                return interrupted(job)\n", ""
    ),
    "a cluster that is away later ends the job": Bug(_SUPERVISOR, " and is_resumed:", " and False:"),
    "what a lost child has started stays": Bug(_SUPERVISOR, "        _kill_marked(self._mark.encode())\n", ""),
    "a finished job seems to run on": Bug(_SUPERVISOR, "        claimed.end(status.phase.value)\n", ""),
}
