# SPDX-License-Identifier: Apache-2.0
"""The CLI verbs that show runs; they read the files in the runs' folders."""

import json
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, JobConflict
from dlrover.python.rl.common.log import cut_middle, echo, inert
from dlrover.python.rl.common.names import hint, log_name
from dlrover.python.rl.config.spec import RUNS
from dlrover.python.rl.master.client.explain import when
from dlrover.python.rl.master.client.resume import find_saved_run
from dlrover.python.rl.page.perfetto import trace as trace_file
from dlrover.python.rl.page.run_data import NO_SAMPLES, RunFolders, RunView
from dlrover.python.rl.page.samples import lineage as trained_samples
from dlrover.python.rl.page.samples import read_samples, sample_steps, select
from dlrover.python.rl.page.spans import last_step, read_steps
from dlrover.python.rl.runtime.member.heartbeat import stacks_of

_PORT = 8480
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_POLL_S, _STACKS_S = 0.5, 5.0
_LONGEST_HINT = 200  # characters
_LAST = 3  # steps of a trace by default


@click.command()
@click.argument("names_or_dirs", nargs=-1, metavar="[RUN]...")
@click.option("--host", default="127.0.0.1", show_default=True, help="A loopback address: the page has no password.")
@click.option("--port", type=click.IntRange(0, 65535), default=_PORT, show_default=True, help="0: any free port.")
@click.option("--name", "names", multiple=True, help="Host name of a proxy in front of the page; repeatable.")
@click.option("--export", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write one HTML file instead.")
def view(names_or_dirs: tuple[str, ...], host: str, port: int, names: tuple[str, ...], file: Path | None) -> None:
    """Serve a page with runs on this machine: curves, recoveries, steps, samples, logs.

    RUN is a run's folder, a job's name below ./runs, or a folder of runs; the default is ./runs."""
    from dlrover.python.rl.page.serve import serve_page  # the server takes a moment

    if file is None:
        folders = {name: _folder_of(name) for name in names_or_dirs or (str(RUNS),)}
        serve_page(folders, host, port, names)
        return
    if len(names_or_dirs) != 1:
        raise InvalidJob([ConfigError("--export", "writes one run: name it")])
    from dlrover.python.rl.page.export import export

    folder = find_saved_run(names_or_dirs[0]).folder
    try:
        file.write_text(export(folder), encoding="utf-8")
    except OSError as error:
        raise JobConflict(f"{file} cannot be written: {error.strerror or error}") from error
    echo(f"{file}: {file.stat().st_size / 1e6:.1f} MB; open it in a browser")


def _folder_of(name_or_dir: str) -> Path:
    """Return the folder of a run or of runs. Raises InvalidJob."""
    path = Path(name_or_dir)
    return path.resolve() if path.is_dir() else find_saved_run(name_or_dir).folder


@click.command()
@click.argument("name_or_dir", metavar="RUN")
@click.option("--steps", default="", metavar="FIRST:LAST", help="Such as 10:12 or 10; by default the last three.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="By default steps-10-12.pftrace.")
def trace(name_or_dir: str, steps: str, output: Path | None) -> None:
    """Write what each process did in some steps, and what it waited for, as a file for ui.perfetto.dev.

    RUN is a run's folder, or the name of a job whose last run is below ./runs."""
    folder = find_saved_run(name_or_dir).folder
    numbers = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", steps)
    if steps and (numbers is None or int(numbers[2] or numbers[1]) < int(numbers[1])):
        raise InvalidJob([ConfigError("--steps", f"must be FIRST:LAST, such as 10:12, got {steps!r}")])
    latest = last_step(folder)
    if not latest:
        why = "has no spans: it ran with spans_mb: 0 or an earlier version, or has only begun"
        raise InvalidJob([ConfigError(name_or_dir, why)])
    first = int(numbers[1]) if numbers is not None else max(latest - _LAST + 1, 1)
    last = int(numbers[2] or first) if numbers is not None else latest
    recorded = read_steps(folder, first, last)
    if not recorded:
        why = f"there are no spans of steps {first} to {last}; the last step with spans is {latest}"
        raise InvalidJob([ConfigError("--steps", why)])
    output = output or Path(f"steps-{first}-{last}.pftrace")
    try:
        output.write_bytes(trace_file(recorded))
    except OSError as error:
        raise JobConflict(f"{output} cannot be written: {error.strerror or error}") from error
    echo(f"{output}: {output.stat().st_size / 1e6:.1f} MB; open it at https://ui.perfetto.dev")


@click.command()
@click.argument("name_or_dir", metavar="RUN")
@click.option("--step", type=click.IntRange(min=0), help="By default the last one.")
@click.option("--worst", type=click.IntRange(min=1), help="Only this many, with the lowest rewards.")
@click.option("--best", type=click.IntRange(min=1), help="Only this many, with the highest rewards.")
@click.option("--prompt", default="", help="Only samples of the prompt with this id.")
@click.option("--grep", default="", help="Only samples with this text in prompt, completion or answer.")
@click.option("--errors", is_flag=True, help="Only samples that failed.")
@click.option(
    "--tokens", is_flag=True, help="Also print each token with its log-prob and advantage, if the run saved them."
)
@_JSON
def samples(name_or_dir: str, step: int | None, worst: int | None, best: int | None, **options: Any) -> None:
    """Print the samples of a step, with rewards, advantages, and what training did with them."""
    if worst and best:
        raise InvalidJob([ConfigError("--worst, --best", "cannot be used together")])
    folder = find_saved_run(name_or_dir).folder
    limits = sample_steps(folder)
    if limits is None:
        raise InvalidJob([ConfigError(name_or_dir, f"has no samples: {NO_SAMPLES}")])
    number, tokens, as_json = limits[1] if step is None else step, options["tokens"], options["as_json"]
    query = {name: str(options[name]) for name in ("prompt",) if options[name]}
    query |= {"q": options["grep"], "errors": "1" if options["errors"] else ""}
    if worst or best:
        query |= {"sort": "reward", "order": "desc" if best else "asc"}
    saved = read_samples(folder, number)
    rows = select(saved, query)[: worst or best]
    if not rows and not limits[0] <= number <= limits[1]:
        raise InvalidJob(
            [ConfigError("--step", f"{number} has no samples: there are steps {limits[0]} to {limits[1]}")]
        )
    prompts = {str(row.get("prompt_id")) for row in saved}
    if options["prompt"] and options["prompt"] not in prompts:
        near = cut_middle(hint(options["prompt"], prompts), _LONGEST_HINT)
        raise InvalidJob([ConfigError("--prompt", f"step {number} has no prompt '{options['prompt']}'{near}")])
    if as_json:
        echo(json.dumps(rows))
        return
    for row in rows:
        echo("\n".join(_sample_lines(row, tokens)) + "\n")
    echo(f"{len(rows)} samples of step {number}", err=True)


_FACTS = ("reward", "advantage", "version", "staleness", "turns", "completion_tokens", "rank", "update")
_WIDEST = 24  # characters of a token


def _sample_lines(row: Mapping[str, Any], tokens: bool) -> list[str]:
    facts = [f"{name} {_short(row[name])}" for name in _FACTS if row.get(name) is not None]
    facts += [f"{name} {_short(value)}" for name, value in row.items() if name.startswith("reward/")]
    lines = [f"prompt {row.get('prompt_id', '')} sample {row.get('sample_index', '')}: {', '.join(facts)}"]
    if row.get("mark"):
        lines.append(f"  {row['mark']}: {row.get('reason', '')}")
    for name in ("prompt", "completion", "answer"):
        if row.get(name) is not None:
            text = row[name] if isinstance(row[name], str) else json.dumps(row[name], ensure_ascii=False)
            lines.append(f"  {name}: {text}".replace("\n", "\n    "))
    if tokens and row.get("tokens"):
        names = [name for name in row if name.startswith("token_")]
        columns = [row[name] for name in names]
        lines.append(f"    {'token':<{_WIDEST}}  {'  '.join(name.removeprefix('token_') for name in names)}")
        for text, *values in zip(row["tokens"], *columns, strict=True):
            numbers = "  ".join(_short(value) for value in values)
            lines.append(f"    {repr(text)[:_WIDEST]:<{_WIDEST}}  {numbers}")
    return lines


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@click.command()
@click.argument("name_or_dir", metavar="RUN")
@click.option("--step", type=click.IntRange(min=1), required=True)
@_JSON
def lineage(name_or_dir: str, step: int, as_json: bool) -> None:
    """Print the samples that a step trained on: prompts, versions of the weights that generated them, and ranks."""
    folder = find_saved_run(name_or_dir).folder
    rows, limits = trained_samples(folder, step), sample_steps(folder)
    if not rows:
        near = f": there are samples of steps {limits[0]} to {limits[1]}" if limits else ""
        raise InvalidJob([ConfigError("--step", f"the run has saved no sample that step {step} trained on{near}")])
    if as_json:
        echo(json.dumps(rows))
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*(name.replace("_", " ") for name in names), box=None)
    for row in rows:
        table.add_row(*(_short(row.get(name, "")) for name in names))
    Console(width=None if sys.stdout.isatty() else 200, markup=False).print(table)
    versions = Counter(row.get("version") for row in rows)
    shares = ", ".join(f"{count} of version {version}" for version, count in sorted(versions.items(), key=str))
    echo(f"step {step}: {len(rows)} samples, by version of the weights: {shares}", err=True)


@click.command()
@click.argument("name_or_dir", metavar="RUN")
@click.argument("process", default="")
@click.option("-f", "--follow", is_flag=True, help="Continue until the run has ended.")
@click.option("--grep", default="", help="Only lines with this text.")
@click.option("--last", type=click.IntRange(min=1), default=200, show_default=True, help="Begin with this many lines.")
@_JSON
def events(name_or_dir: str, process: str, follow: bool, grep: str, last: int, as_json: bool) -> None:
    """Print a run's events and log lines in order of time, of PROCESS (such as rollout-1) or of all processes."""
    run, cursor = RunView(find_saved_run(name_or_dir).folder, "."), ""
    while True:
        stream = run.events(cursor, process, grep, last)
        cursor = stream["next"]
        for each in stream["events"]:
            text = each["text"] if each["kind"] == "log" else f"--- {each['text']}"
            echo(json.dumps(each) if as_json else f"{when(each['at_s'])} {each['process']:<12} {text}")
        if not follow or run.view.ended:
            return
        time.sleep(_POLL_S)


@click.command()
@click.argument("name_or_dir", metavar="RUN")
@click.argument("process", default="")
@_JSON
def stacks(name_or_dir: str, process: str, as_json: bool) -> None:
    """Print the Python stacks of the processes of a live run on this machine, without stopping them."""
    run = RunView(find_saved_run(name_or_dir).folder, ".")
    names = {log_name(each["process"]): each for each in run.members() if each["pid"]}
    process = log_name(process)
    if process and process not in names:
        raise InvalidJob([ConfigError(process, f"is not running{hint(process, names)}")])
    if not names or run.view.ended:
        raise InvalidJob([ConfigError(name_or_dir, "has no running process in its journal")])
    rows = []
    for member in (each for name, each in names.items() if process in ("", name)):
        is_here = member["node"] == socket.gethostname()
        text = stacks_of(member["pid"], _STACKS_S) if is_here else f"run 'py-spy dump --pid {member['pid']}' there"
        rows.append({**{name: member[name] for name in ("process", "pid", "node")}, "stacks": text})
        if not as_json:
            echo(f"--- {member['process']}, pid {member['pid']} on {member['node']}\n{text}")
    if as_json:
        echo(json.dumps(rows))


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=RUNS)
@_JSON
def runs(folder: Path, as_json: bool) -> None:
    """List the runs in and below FOLDER, by default ./runs, with their last metrics."""
    rows = RunFolders([folder.resolve()]).rows()
    if as_json:
        echo(json.dumps(rows))
        return
    if not rows:
        echo(f"no runs in or below {folder}")
        return
    table = Table("run", "phase", "step", "reward", "goodput", "recoveries", "elapsed", "began", box=None)
    for row in rows:
        steps = f"{row['step']}/{row['total_steps']}" if row["total_steps"] else str(row["step"])
        shares = ["" if row[name] is None else _short(row[name]) for name in ("reward", "goodput", "recoveries")]
        span = str(timedelta(seconds=int(row["elapsed_s"])))
        began = when(row["started_s"]) if row["started_s"] else ""
        table.add_row(inert(row["id"]), inert(row["phase"]), steps, *shares, span, began)
    Console(width=None if sys.stdout.isatty() else 200, markup=False).print(table)


VERBS = (view, trace, samples, lineage, events, stacks, runs)
