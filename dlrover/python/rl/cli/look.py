# SPDX-License-Identifier: Apache-2.0
"""The verbs for looking at runs, from the files in their folders."""

import re
from pathlib import Path

import click

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, JobConflict
from dlrover.python.rl.common.log import echo
from dlrover.python.rl.config.spec import RUNS
from dlrover.python.rl.master.client.resume import find_saved_run
from dlrover.python.rl.page.perfetto import trace as trace_file
from dlrover.python.rl.page.spans import last_step, read_steps

_PORT = 8480
_LAST = 3  # steps of a trace by default


@click.command()
@click.argument("names_or_dirs", nargs=-1, metavar="[RUN]...")
@click.option("--host", default="127.0.0.1", show_default=True, help="A loopback address: there are no passwords.")
@click.option("--port", type=click.IntRange(0, 65535), default=_PORT, show_default=True, help="0: any free port.")
@click.option("--export", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write one HTML file instead.")
def view(names_or_dirs: tuple[str, ...], host: str, port: int, file: Path | None) -> None:
    """Serve a page with runs on this machine: curves, recoveries, steps, samples, logs.

    RUN is a run's folder, a job's name below ./runs, or a folder of runs; the default is ./runs."""
    from dlrover.python.rl.page.serve import serve_page  # the server takes a moment

    folders = {name: _folder_of(name) for name in names_or_dirs or (str(RUNS),)}
    if file is None:
        serve_page(folders, host, port)
        return
    if len(folders) != 1:
        raise InvalidJob([ConfigError("--export", "writes one run: name it")])
    from dlrover.python.rl.page.export import export

    (folder,) = folders.values()
    try:
        file.write_text(export(folder), encoding="utf-8")
    except OSError as error:
        raise JobConflict(f"{file} cannot be written: {error.strerror or error}") from error
    echo(f"{file}: {file.stat().st_size / 1e6:.1f} MB; open it in a browser")


def _folder_of(name_or_dir: str) -> Path:
    """Return the folder of a run or of runs. Raises InvalidJob."""
    path = Path(name_or_dir)
    if path.is_dir() and not (path / "latest").is_dir():
        return path.resolve()
    return find_saved_run(name_or_dir).folder


@click.command()
@click.argument("name_or_dir", metavar="RUN")
@click.option("--steps", default="", metavar="FIRST:LAST", help="Such as 10:12 or 10; by default the last three.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="By default steps-10-12.pftrace.")
def trace(name_or_dir: str, steps: str, output: Path | None) -> None:
    """Write what each process did in some steps, and what it waited for, as a file for ui.perfetto.dev.

    RUN is a run's folder, or the name of a job whose last run is below ./runs."""
    folder = find_saved_run(name_or_dir).folder
    numbers = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", steps)
    if steps and numbers is None:
        raise InvalidJob([ConfigError("--steps", f"must be FIRST:LAST, such as 10:12, got {steps!r}")])
    latest = last_step(folder)
    first = int(numbers[1]) if numbers is not None else max(latest - _LAST + 1, 1)
    last = int(numbers[2] or first) if numbers is not None else latest
    recorded = read_steps(folder, first, last)
    if not recorded:
        why = f"the last step with spans is {latest}" if latest else "the run has none: it is older, or has spans_mb: 0"
        raise InvalidJob([ConfigError("--steps", f"there are no spans of steps {first} to {last}; {why}")])
    output = output or Path(f"steps-{first}-{last}.pftrace")
    try:
        output.write_bytes(trace_file(recorded))
    except OSError as error:
        raise JobConflict(f"{output} cannot be written: {error.strerror or error}") from error
    echo(f"{output}: {output.stat().st_size / 1e6:.1f} MB; open it at https://ui.perfetto.dev")


VERBS = (view, trace)
