# SPDX-License-Identifier: Apache-2.0
"""Bugs in commits on disk, in memory and in an object store: what is whole, what is kept, and who may write."""

from bug import Bug

_CHECKPOINT = "runtime/checkpoint"
_STORE, _FILE, _OBJECTS = (f"{_CHECKPOINT}/{name}.py" for name in ("store", "state_file", "object_store"))
_JOURNAL = f"{_CHECKPOINT}/journal_store.py"
_MEMORY, _NEIGHBOURS, _MEMBER = (f"{_CHECKPOINT}/{name}.py" for name in ("node_memory", "neighbours", "member_state"))
_COMMITS, _RUNS = (f"{_CHECKPOINT}/{name}.py" for name in ("commits", "runs"))

TESTS = {
    _OBJECTS: ("runtime/test_object_store.py",),
    _MEMORY: ("runtime/test_node_memory.py", "runtime/ray/test_cluster_api.py"),
    _JOURNAL: ("runtime/test_journal_store.py", "../protocol/test_journal_disk.py"),
    _COMMITS: ("runtime/test_commits.py", "runtime/test_object_store.py"),
    _RUNS: (
        "runtime/test_commits.py",
        "runtime/test_store.py",
        "runtime/test_runs.py",
        "runtime/test_result_files.py",
    ),
}

BUGS = {
    "serials stop once generations are removed": Bug(
        _STORE, "1 + max((old.serial for old in existing), default=0)", "1 + len(existing)"
    ),
    "a commit that is made again is another one": Bug(
        _STORE, "if replace(old, serial=0, committed_at=0.0) == manifest:", "if False:"
    ),
    "folders of crashed steps stay": Bug(
        _STORE, "name in committed or (step <= newest.step and epoch <= newest.epoch)", "name in committed"
    ),
    "a step that is being written is removed": Bug(
        _STORE, "(step <= newest.step and epoch <= newest.epoch)", "epoch <= newest.epoch"
    ),
    "the newest damaged ones are removed": Bug(
        _STORE, "sorted(bad, key=_changed_at)[:-_KEPT_BAD]", "sorted(bad, key=_changed_at)[_KEPT_BAD:]"
    ),
    "folders that are half removed stay": Bug(
        _STORE, "            if name.endswith(_GONE):\n", "            if False:\n"
    ),
    "what is being copied makes room first": Bug(
        _STORE, "protected = set() if pinned else self.pinned", "protected = set[int]()"
    ),
    "the commit that is needed makes room": Bug(
        _STORE, "if ids[0] < step and ids[0] not in protected]", "if ids[0] <= step and ids[0] not in protected]"
    ),
    "a commit is intact if its length is": Bug(
        _STORE, "[[Path, StateFile], None] = check_file)", "[[Path, StateFile], None] = check_size)"
    ),
    "the run with most steps is continued": Bug(
        _RUNS, "key=lambda pair: (ended[pair[0].run], pair[1].step)", "key=lambda pair: pair[1].step"
    ),
    "a node drops what it copies": Bug(
        _STORE, "if folder[0] < step and folder[0] not in self.pinned:", "if folder[0] < step:"
    ),
    "a damaged epoch lets everyone in": Bug(_STORE, "        return self._fallback()\n", "        return 0\n"),
    "a lock that was taken over still holds": Bug(
        _STORE, "if is_current := _is_at(handle, self._lock):", "if is_current := True:"
    ),
    "the lock of a frozen process stays": Bug(_STORE, "            fresh.replace(self._lock)\n", ""),
    "a manifest that is not safe counts": Bug(
        _STORE, "        path.unlink(missing_ok=True)  # it may", "        pass  # it may"
    ),
    "a copy is not on the disk when it counts": Bug(
        _FILE, "with new_file(target / file.name, durable, file.nbytes)", "with new_file(target / file.name, False, 0)"
    ),
    "the name of a state is not on the disk": Bug(
        _FILE, "        raise\n    if durable:\n        sync_folder(path.parent)\n", "        raise\n"
    ),
    "the room of an overwritten file does not count": Bug(
        _FILE, "free += recycled.stat().st_size if recycled is not None else 0", "free += 0"
    ),
    "a state is begun without room for it": Bug(_FILE, "    if free < nbytes:\n", "    if False:\n"),
    "a neighbour takes a file that was damaged on the way": Bug(
        _FILE, "        check_file(folder, replace(file, name=temporary.name))\n", ""
    ),
    "a neighbour takes a damaged trainer's part": Bug(
        _FILE,
        "    _check(folder / file.name, len(content), crc32(content), bytes(content[-_CRC.size :]), file)\n",
        "",
    ),
    "a neighbour keeps the end of an overwritten file": Bug(
        _FILE, "            parts.truncate()\n", "            pass\n"
    ),
    "names of new folders are not on the disk": Bug(
        _FILE, "for each in missing if durable else ():", "for each in ():"
    ),
    "a half-written file stays": Bug(
        _FILE,
        "        with suppress(OSError):\n            temporary.unlink()\n        if isinstance(error",
        "        if isinstance(error",
    ),
    "an object store that is away is damaged": Bug(
        _COMMITS,
        "if isinstance(self.store, ObjectStore) or not is_transient(error):",
        "if not is_transient(error):",
    ),
    "a trainer that ended early keeps memory from being saved": Bug(
        _MEMORY, "max(manifest.epoch, copies.epoch)", "manifest.epoch"
    ),
    "a saved commit is lost with its nodes": Bug(
        _MEMORY,
        " for name, value in manifest.extra.items() if name != NODES}",
        " for name, value in manifest.extra.items()}",
    ),
    "two trainers that claim at once both continue": Bug(
        _OBJECTS, 'b"%d" % epoch)\n        self._check(epoch)\n', 'b"%d" % epoch)\n'
    ),
    "a replaced trainer commits to an object store": Bug(
        _OBJECTS, "        self._check(epoch)\n        manifest = Manifest(", "        manifest = Manifest("
    ),
    "an object store keeps one too many": Bug(_OBJECTS, "existing[: self.keep - 1]", "existing[: self.keep]"),
    "a discarded commit in an object store is loaded": Bug(
        _OBJECTS, "if MANIFEST not in names or _BAD in names:", "if MANIFEST not in names:"
    ),
    "what is half removed from an object store counts": Bug(
        _OBJECTS,
        "                with suppress(FileNotFoundError):\n"
        '                    self._fs.rm_file(f"{self._path}/{name}/{MANIFEST}")\n',
        "",
    ),
    "a discarded step can never be made again": Bug(
        _OBJECTS, "for name in (MANIFEST, _BAD) if marked else ():", "for name in ():"
    ),
    "memory of a job with a longer name is removed": Bug(
        _MEMORY, "if name != job or run not in (None, its_run):", "if run not in (None, its_run):"
    ),
    "memory that cannot be saved is removed": Bug(
        _MEMORY,
        "            else:\n                shutil.rmtree(root, ignore_errors=True)\n",
        "            shutil.rmtree(root, ignore_errors=True)\n",
    ),
    "memory that others can read is used": Bug(_MEMORY, " or state.st_mode & 0o077:", ":"),
    "memory with a later copy is saved over it": Bug(
        _MEMORY, "if manifest.step > newest and _save_generation(", "if _save_generation("
    ),
    "memory without the trainer's part ends a recovery": Bug(
        _NEIGHBOURS, "with suppress(FileNotFoundError):", "with suppress(ZeroDivisionError):"
    ),
    "another step's copy is the last one": Bug(
        _MEMBER,
        "copy is not None and copy.step == request.step:",
        "copy is not None:",
    ),
    "one of more workers takes the state of its rank": Bug(
        _MEMBER, "if len(pieces) == self._members and self._rank in pieces:", "if self._rank in pieces:"
    ),
    "a full disk of a worker gets no room": Bug(
        _MEMBER, "self._disk_wait, partial(store.free_space, request.first_needed))", "self._disk_wait)"
    ),
    "a copy that failed is awaited": Bug(
        _COMMITS,
        "        elif all(answer.copy is not None or answer.is_copying for answer in answers.values()):\n",
        "        else:\n",
    ),
    "copies of earlier runs stay": Bug(_COMMITS, "            prune_earlier_runs(self.durable)\n", ""),
    "a copy lacks the files of its step": Bug(
        _COMMITS, "                self.files.upload()\n", "                pass\n"
    ),
    "a copy begins while another one is under way": Bug(_COMMITS, "due and self.copying.at is None and", "due and"),
    "a run whose only commit is damaged begins again": Bug(
        _COMMITS, "if damaged or self.last_known is not None:", "if self.last_known is not None:"
    ),
    "a commit that is given up is copied on": Bug(
        _COMMITS, "        if self.copying.step == step:\n            self.copying.end()\n", ""
    ),
    "a worker's last writer is the one of its oldest commit": Bug(
        _COMMITS, 'max(int(file.name.split(".")[-2]), writers.get(member, 0))', 'int(file.name.split(".")[-2])'
    ),
    "commits of this run go with earlier ones": Bug(_RUNS, "if root.name != durable.run:", "if root.name:"),
    "each run keeps as many copies as one": Bug(_RUNS, "            room -= len(newest)\n", ""),
    "one node of several has the last steps alone": Bug(
        _RUNS, '"job_dir" if job.scheduling_strategy == "SIMPLE" and not job.archive else "memory"', '"memory"'
    ),
    "a file that was cut here is not fetched": Bug(
        _RUNS, 'target.is_file() and target.stat().st_size >= details["size"]', "target.is_file()"
    ),
    "lines of a journal that were safe may be missing": Bug(_JOURNAL, "    if len(lines) < safe:\n", "    if False:\n"),
    "lines are not synced": Bug(
        _JOURNAL,
        "                    _write(self._file, header, 0)\n                    os.fsync(self._file)\n",
        "                    _write(self._file, header, 0)\n",
    ),
    "a new journal gets its name before it is safe": Bug(
        _JOURNAL, "            file.flush()\n            os.fsync(file.fileno())\n", "            file.flush()\n"
    ),
    "a journal's name is synced by its creator alone": Bug(
        _JOURNAL, "        sync_folder(path.parent)\n        self._path", "        self._path"
    ),
    "half a line stays at the end": Bug(_JOURNAL, "                os.ftruncate(self._file, journal.end)\n", ""),
    "half a line stays after the disk was full": Bug(
        _JOURNAL,
        "        os.ftruncate(self._file, self._end)\n        _write(self._file, self._header, 0)\n",
        "        _write(self._file, self._header, 0)\n",
    ),
    "a journal is written on after an error of its disk": Bug(
        _JOURNAL, "            if self._suspect:\n", "            if False:\n"
    ),
}
