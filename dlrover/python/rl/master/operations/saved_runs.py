# SPDX-License-Identifier: Apache-2.0
"""Jobs by the folders of their runs, whose files tell how they are: no cluster is asked."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, JournalCorrupt
from dlrover.python.rl.common.names import is_job_name
from dlrover.python.rl.common.no_links import with_real_parent
from dlrover.python.rl.master.operations.history import JobHistory, read_history
from dlrover.python.rl.master.operations.jobs import JobView, view_of_folder
from dlrover.python.rl.master.saved_run import SavedRun, find_saved_run
from dlrover.python.rl.runtime.run.files import LogReader, RunFolder
from dlrover.python.rl.runtime.run.owner import LAUNCHED, newest_owner

_POLL_S = 0.5


def is_run_folder(name_or_dir: str) -> bool:
    """Whether it names a run by its folder: it is no job's name, or the folder of a run of another job."""
    owner = newest_owner(Path(name_or_dir))
    return not is_job_name(name_or_dir) or (owner is not None and owner.job != name_or_dir)


class SavedRuns:
    """``name`` is a folder."""

    def get(self, name: str) -> JobView:
        return view_of_run(find_saved_run(name))

    def history(self, view: JobView) -> JobHistory | None:
        with suppress(JournalCorrupt, OSError):
            return JobHistory.of_folder(Path(view.folder)) if view.folder else None
        return None

    def logs(self, name: str, process: str, follow: bool, tail: int) -> Iterator[tuple[str, str]]:
        view = self.get(name)
        reader = LogReader(RunFolder(with_real_parent(Path(view.folder))), process, tail)
        while True:
            reader.check(view.roles if follow and not view.ended else None)
            yield from reader.read()
            if view.ended or not follow:
                return
            time.sleep(_POLL_S)
            view = self.get(name)


def view_of_run(run: SavedRun, asked: str = "") -> JobView:
    """``asked``: see :func:`view_of_folder`. Raises InvalidJob if there is no journal, or JournalCorrupt."""
    history = read_history(run.folder)
    if history is None:
        why = "a launcher began the run" if run.owner.runtime == LAUNCHED else "the run has not begun"
        raise InvalidJob([ConfigError(str(run.folder), f"has no journal: {why}")])
    return view_of_folder(run.owner.job, run.folder, history, asked)
