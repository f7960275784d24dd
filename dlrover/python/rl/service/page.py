# SPDX-License-Identifier: Apache-2.0
"""The page of the service's jobs: the same as ``view``'s, behind the service's tokens; every role may look."""

import asyncio
from pathlib import Path

from dlrover.python.rl.page.app import create_app
from dlrover.python.rl.page.run_data import EMPTY_ROW, Plain, RunFolders, RunView, row_of
from dlrover.python.rl.runtime.http import TaskServer, listen
from dlrover.python.rl.service.auth import TokenFile
from dlrover.python.rl.service.jobs.records import JobRecord
from dlrover.python.rl.service.manager import JobManager
from dlrover.python.rl.service.server import FailureLimit

_ANSWER_S = 10.0


class ServiceRuns(RunFolders):
    """The jobs of the service, also those that wait. Used in threads; the manager is asked in its event loop."""

    def __init__(self, manager: JobManager) -> None:
        super().__init__(())
        self._manager, self._loop = manager, asyncio.get_running_loop()

    def records(self) -> list[JobRecord]:
        async def read() -> list[JobRecord]:
            return self._manager.list_jobs(ended=True)

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(_ANSWER_S)

    def folders(self) -> dict[str, Path]:
        placed = {_id_of(record): record.folder or record.results for record in self.records()}
        return {run_id: Path(folder) for run_id, folder in placed.items() if folder and Path(folder).is_dir()}

    def all(self) -> list[RunView]:
        owners, runs = {_id_of(record): record.owner for record in self.records()}, super().all()
        for run in runs:
            run.owner = owners.get(run.run_id, "")
        return runs

    def rows(self) -> list[Plain]:
        runs = {run.run_id: run for run in self.all()}
        rows = []
        for record in self.records():
            run_id = _id_of(record)
            values = row_of(runs[run_id]) if run_id in runs else EMPTY_ROW
            shared = {"id": run_id, "name": record.name, "owner": record.owner, "phase": record.phase.value}
            reason = record.reason or values.get("reason", "")
            rows.append({**values, **shared, "reason": reason, "total_steps": record.total_steps})
        return rows


def _id_of(record: JobRecord) -> str:
    return f"{record.name}/{record.run}"


def serve_jobs(
    manager: JobManager, tokens: TokenFile, host: str, port: int, tls: tuple[Path, Path] | None
) -> tuple[TaskServer, str]:
    """Serve the page in the running event loop, and return its server and address. Raises JobConflict."""
    listener = listen(host, port)
    server = TaskServer(create_app(ServiceRuns(manager), tokens.caller, FailureLimit().take), listener, tls)
    return server, f"{'https' if tls else 'http'}://{host}:{listener.getsockname()[1]}/"
