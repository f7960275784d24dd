# SPDX-License-Identifier: Apache-2.0
"""Trying a seeded bug: a copy of the repository with it, and the tests that are meant to see it.

python tests/mutations/trying.py [PART OF A NAME OR FILE ...]
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import Queue

from seeded_bugs import BUGS, TESTS, Bug

REPOSITORY = Path(__file__).resolve().parents[2]
CPU_LIMIT_S = 60
_COPIED = ("dlrover", "tests", "pyproject.toml")


@contextmanager
def copies(count: int) -> Iterator["Queue[Path]"]:
    """Copies of the repository to change."""
    folders: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory(prefix="dlrover-rl-bugs-") as parent:
        for number in range(count):
            _copy_to(folder := Path(parent) / str(number))
            folders.put(folder)
        yield folders


def _copy_to(folder: Path) -> None:
    for name in _COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def path_of(bug: Bug, folder: Path = REPOSITORY) -> Path:
    return folder / "dlrover" / "python" / "rl" / bug.file


def files_for(file: str) -> list[str]:
    return [f"tests/unit/{name}" for name in TESTS[file]]


def caught_by(bug: Bug, folder: Path) -> str:
    """The first test that fails with ``bug``, ``""`` for none; in a copy, which is as before afterwards."""
    path = path_of(bug, folder)
    source = path.read_text(encoding="utf-8")
    path.write_text(bug.apply(source), encoding="utf-8")
    try:
        return failure_of(files_for(bug.file), folder)
    finally:
        path.write_text(source, encoding="utf-8")


def failure_of(tests: list[str], folder: Path) -> str:
    """The first of the fast tests that fails, in at most a minute of processor time."""
    options = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, *options, "-m", "not slow and not ray", *tests]
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))

    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, preexec_fn=limit, check=False, timeout=1800
    )
    if done.returncode < 0:
        return f"it takes longer than {CPU_LIMIT_S} s"
    if done.returncode == 0:
        return ""
    match = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return match[1] if match else f"pytest ends with {done.returncode}"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def try_all(names: list[str], workers: int = 2) -> dict[str, str]:
    with copies(workers) as folders, ThreadPool(workers) as pool:

        def attempt(name: str) -> str:
            folder = folders.get()
            try:
                catcher = caught_by(BUGS[name], folder)
            finally:
                folders.put(folder)
            _say(f"{name}: {catcher or 'MISSED'}")
            return catcher

        return dict(zip(names, pool.map(attempt, names, chunksize=1), strict=True))


if __name__ == "__main__":
    wanted = [name for name, bug in BUGS.items() if any(part in f"{name} {bug.file}" for part in sys.argv[1:] or [""])]
    missed = [name for name, test in try_all(wanted).items() if not test]
    _say(f"{len(missed)} of {len(wanted)} were missed: {missed}")
