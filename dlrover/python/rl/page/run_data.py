# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: the answers about a run stand together, as the views of the page that show them.
"""The data of a run that the page shows, in plain values for JSON. They are read from the run's folder only: the run's
processes are never contacted."""

import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.common.log import redacted
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.common.private_files import open_file
from dlrover.python.rl.config.plain import MAX_BYTES
from dlrover.python.rl.master.client.explain import advice
from dlrover.python.rl.master.client.jobs import total_steps_in, view_of_folder
from dlrover.python.rl.master.client.views import JobHistory, JobView
from dlrover.python.rl.master.process.live import read_live
from dlrover.python.rl.master.process.status import reward_of
from dlrover.python.rl.page import curves, samples, spans
from dlrover.python.rl.page.findings import findings, slow_parts
from dlrover.python.rl.page.perfetto import trace
from dlrover.python.rl.page.stream import read_stream
from dlrover.python.rl.page.timeline import REPAIRS, Timeline, last_sign_s, members_of, read_timeline, with_steps
from dlrover.python.rl.runtime.run.files import RECORDS
from dlrover.python.rl.runtime.run.folder import in_use, newest_owner
from dlrover.python.rl.runtime.run.names import DESCRIPTION, METRICS

Plain = dict[str, Any]

_MOST_RUNS, _MOST_POINTS, _MOST_ROWS, _MOST_SPANS = 2000, 5000, 500, 50
_MOST_ALIASES = 10  # of a description: a job may replace its own by one that grows without bound
_DEEPEST = 3  # levels of folders below the served one in which runs are looked for

NO_SAMPLES = "log.samples may be off, the recipe may have none, or the run has only begun"


def find_runs(root: Path) -> dict[str, Path]:
    """Return the folders of runs in and below ``root`` by their paths relative to it; if ``root`` is a run itself, its
    path is ``"."``. Links are not followed, so that the run behind ``latest`` does not count twice."""
    found_runs: dict[str, Path] = {}

    def visit(folder: Path, depth: int) -> None:
        if len(found_runs) >= _MOST_RUNS:
            return
        is_begun = (folder / DESCRIPTION).is_file() and newest_owner(folder) is not None
        if is_begun or (folder / METRICS).is_file():
            found_runs[str(folder.relative_to(root))] = folder
        elif depth:
            with suppress(OSError):
                inner = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
                for each in sorted(inner):
                    visit(each, depth - 1)

    visit(root, _DEEPEST)
    return found_runs


class RunView:
    """The run in ``folder``, called ``run_id`` on the page; ``owner`` replaces the user who began it. Each method reads
    what is new since its last call."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder, self.run_id, self.owner = folder, run_id, ""
        self._metrics = curves.MetricsFile(folder / METRICS)
        self._superseded = curves.MetricsFile(folder / "metrics.superseded.jsonl")
        self._cached: dict[str, tuple[Any, Any]] = {}  # state of files, and what was read from them

    # -- the whole run ------------------------------------------------------------------------------------------------

    def row(self) -> Plain:
        """Return this run's row in the list of runs, without reading all of its metrics."""
        view, timeline = self.view, self.timeline
        spark = self._cache("spark", (METRICS,), lambda: curves.spark(self.folder / METRICS))
        marks = [mark for mark in timeline.marks if mark.kind in REPAIRS]
        until_s = last_sign_s(self.folder)
        devices = {(each["node"], item) for each in self.members() for item in each["devices"].split(",") if item}
        return {
            "id": self.run_id,
            "name": view.name,
            "owner": self.owner or (self._owner.user if self._owner else ""),
            "phase": view.phase,
            "step": view.step,
            "total_steps": view.total_steps,
            "last_step_s": view.last_step_s,
            "reward": curves.number_of(view.reward),
            "spark": spark,
            "goodput": timeline.goodput(until_s),
            "recoveries": None if timeline.error else len(marks),
            "devices": len(devices),
            "started_s": view.started_s,
            "elapsed_s": max(until_s - view.started_s, 0.0) if view.started_s else 0.0,
            "reason": timeline.error or view.reason,
            "journal_error": timeline.error,
        }

    def overview(self) -> Plain:
        view, timeline = self.view, self.timeline
        open_end_s = last_sign_s(self.folder) if view.ended else 0.0
        failure = timeline.state.failure or timeline.state.first_cause
        cause = failure.kind.value if failure else view.cause
        return {
            **self.row(),
            "folder": str(self.folder),
            "roles": dict(view.roles),
            "members": self.members(),
            "cause": cause,
            "message": f"{failure.who}: {failure.message}" if failure else view.reason,
            "detail": failure.detail if failure else view.detail,
            "try": list(advice(replace(view, cause=cause))),
            "strip": [{**vars(use), "end_s": use.end_s or open_end_s} for use in timeline.uses],
            "uses": self.uses(),
            "settings": self.settings(),
        }

    def uses(self) -> list[Plain]:
        spent = self.timeline.spent_s(last_sign_s(self.folder))
        return [{"use": use, "cause": why, "seconds": each} for (use, why), each in spent.items()]

    def members(self) -> list[Plain]:
        state = self.timeline.state
        is_live = not state.phase.terminal and in_use(self.folder)
        return members_of(state, read_live(self.folder, time.time()), is_live)

    @property
    def view(self) -> JobView:
        """The run's state, from its journal; for a run without one, in one process or under a launcher, from the record
        of its owner."""
        timeline, owner = self.timeline, self._owner
        name = owner.job if owner else self.folder.name
        if timeline.entries and not timeline.error:
            history = JobHistory(0.0, state=timeline.state, began_s=timeline.began_s, last_s=timeline.entries[-1][0])
            return view_of_folder(name, self.folder, history)
        last, changed_s = curves.last_row(self.folder / METRICS)
        is_live, began_s = in_use(self.folder), owner.since_s if owner else 0.0
        phase = "running" if is_live else owner.state if owner and owner.state != "running" else "lost"
        return JobView(
            name=name,
            phase=phase,
            ended=not is_live,
            step=int(last.get("step", 0)),
            total_steps=total_steps_in(self.folder),
            last_step_s=changed_s,
            reward=reward_of(last) if last else float("nan"),
            started_s=began_s,
            elapsed_s=max(changed_s - began_s, 0.0) if began_s else 0.0,
            folder=str(self.folder),
        )

    @property
    def timeline(self) -> Timeline:
        timeline: Timeline = self._cache("timeline", ("journal*.jsonl",), lambda: read_timeline(self.folder))
        return timeline

    @property
    def _owner(self) -> Any:
        return self._cache("owner", (RECORDS,), lambda: newest_owner(self.folder))

    def settings(self) -> Plain:
        """Return the job's settings by dotted keys; secrets are hidden in the file."""

        path = self.folder / DESCRIPTION

        def read() -> Plain:
            with suppress(OSError, yaml.YAMLError, UnicodeDecodeError), open_file(path) as file:
                text = file.read(MAX_BYTES).decode()
                aliases = (event for event in yaml.parse(text, _LOADER) if isinstance(event, yaml.AliasEvent))
                if len(list(aliases)) <= _MOST_ALIASES:
                    return dict(_flatten("", yaml.load(text, _LOADER)))  # noqa: TID251 -- the safe loader in C
            return {}

        settings: Plain = self._cache("settings", (DESCRIPTION,), read)
        return settings

    # -- its steps ----------------------------------------------------------------------------------------------------

    def metrics(self) -> Plain:
        rows = self._metrics.rows()
        some = (*rows[:3], *rows[:: max(len(rows) // 200, 1)], *rows[-20:])
        names = sorted({name for row in some for name in row} - {"step"})
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(name.partition("/")[0] if "/" in name else "", []).append(name)
        return {"names": names, "groups": groups}

    def curves(self, names: Sequence[str], points: int) -> Plain:
        """Return the curves of metrics, thinned to ``points`` steps, and the curves of earlier attempts."""
        wanted = list(names) or self.metrics()["names"]
        limit = min(points, _MOST_POINTS)
        main, repeated = (curves.series_of(each.rows(), wanted, limit) for each in (self._metrics, self._superseded))
        return {**main, "superseded": repeated}

    def marks(self) -> Plain:
        timeline = self.timeline
        return {"marks": with_steps(timeline.marks, self._step_at), "journal_error": timeline.error}

    def step(self, number: int) -> Plain:
        """Return a step's time by parts, the lanes of its last attempt, and findings about all of its attempts; without
        parts for a step that has not ended. Raises CallError for an unknown step."""
        rows = self._metrics.rows()
        at = bisect_right(rows, number, key=lambda row: row["step"]) - 1
        row = rows[at] if at >= 0 and rows[at]["step"] == number else None
        attempts = spans.read_steps(self.folder, number, number, time.time() if in_use(self.folder) else None)
        if row is None and not attempts:
            last = rows[-1]["step"] if rows else 0
            raise CallError(f"step {number} has neither metrics nor spans: the last step with metrics is {last}")
        begin_s, end_s = (attempts[-1].begin_s, attempts[-1].end_s) if attempts else (0.0, 0.0)
        replacing_s = attempts[-1].replacing_s if attempts else 0.0
        total_s, parts = curves.parts_of(row, replacing_s) if row else (end_s - begin_s, [])
        lanes = [
            {"process": lane.process, "spans": [_shifted(span, begin_s) for span in lane.spans]}
            for lane in (attempts[-1].lanes if attempts else ())
        ]
        metrics = {name: curves.number_of(value) for name, value in (row or {}).items() if name != "step"}
        return {
            "step": number,
            "is_unfinished": row is None,
            "began_s": begin_s,
            "total_s": total_s,
            "parts": parts,
            "metrics": metrics,
            "lanes": lanes,
            "findings": [vars(each) for each in findings(attempts) or (slow_parts(rows[: at + 1]) if row else ())],
            "first": min([number, *(each["step"] for each in rows[:1])]),
            "last": max([number, *(each["step"] for each in rows[-1:]), spans.last_step(self.folder)]),
        }

    def trace(self, first: int, last: int) -> bytes:
        """Return a Perfetto file of steps. Raises CallError if none of them has spans."""
        if last - first >= _MOST_SPANS:
            raise CallError(f"a trace has at most {_MOST_SPANS} steps")
        recorded = spans.read_steps(self.folder, first, last)
        if not recorded:
            raise CallError(f"steps {first} to {last} have no spans: spans_mb may be 0, or their files were rotated")
        return trace(recorded)

    def _step_at(self, at_s: float) -> int:
        """Return the step that ran at a Unix time: subtract steps' seconds from the last change of the metrics."""
        rows = self._metrics.rows()
        _, ended_s = curves.last_row(self.folder / METRICS)
        for row in reversed(rows):
            if ended_s <= at_s:
                return int(row["step"]) + 1
            ended_s -= curves.number_of(row.get("time/step")) or 0.0
        return int(rows[0]["step"]) if rows else 1

    # -- its samples and logs -----------------------------------------------------------------------------------------

    def samples(self, query: Mapping[str, str]) -> Plain:
        """Return a page of the samples of ``step``, the last one by default, chosen and sorted by
        :func:`~dlrover.python.rl.page.samples.select`."""
        limits = samples.sample_steps(self.folder)
        if limits is None:
            raise CallError(f"this run has no samples: {NO_SAMPLES}")
        number = number_in(query, "step", limits[1])
        rows = samples.read_samples(self.folder, number)
        chosen = samples.select(rows, query)
        offset, count = number_in(query, "offset", 0), min(number_in(query, "limit", 200), _MOST_ROWS)
        names = sorted({name for row in rows for name in row if name.startswith("reward/")})
        page = [_finite(row) for row in chosen[offset : offset + count]]
        place = {"step": number, "first": limits[0], "last": limits[1], "total": len(chosen)}
        return {**place, "rows": page, "functions": names}

    def evaluations(self, prompt: str = "") -> Plain:
        """Return the evaluations and their prompts, and the answers to ``prompt`` if it is not empty."""
        steps = samples.read_evaluations(self.folder)
        newest = samples.read_evaluation(self.folder, steps[-1]) if steps else []
        prompts = {str(row.get("prompt_id", at)): str(row.get("prompt", ""))[:200] for at, row in enumerate(newest)}
        answers = [
            {"step": each, "rows": [_finite(row) for row in rows if str(row.get("prompt_id")) == prompt]}
            for each in (steps if prompt else ())
            for rows in [samples.read_evaluation(self.folder, each)]
        ]
        listed = [{"prompt_id": name, "prompt": text} for name, text in prompts.items()]
        return {"steps": steps, "prompts": listed, "answers": answers}

    def events(self, after: str, process: str, search: str, limit: int) -> Plain:
        stream = read_stream(self.folder, self.timeline.entries, after, process, min(limit, 10 * _MOST_ROWS), search)
        return {**stream, "events": [{**each, "text": redacted(each["text"])} for each in stream["events"]]}

    def version(self) -> Plain:
        """Return what a watcher compares to see that something has changed."""
        last, changed_s = curves.last_row(self.folder / METRICS)
        marks = [(mark.at_s, mark.cost_s) for mark in self.timeline.marks]
        return {"step": last.get("step", 0), "marks": len(marks) + sum(cost is not None for _, cost in marks),
                "phase": self.view.phase, "at_s": changed_s}  # fmt: skip

    def _cache(self, name: str, patterns: Sequence[str], read: Callable[[], Any]) -> Any:
        """Return the result of ``read``; call it again only after a file that matches ``patterns`` has changed."""
        state = []
        with suppress(OSError):
            for name_of_file in sorted(os.listdir(self.folder)):
                if any(fnmatchcase(name_of_file, pattern) for pattern in patterns):
                    stat = os.stat(self.folder / name_of_file)
                    state.append((name_of_file, stat.st_ino, stat.st_size, stat.st_mtime_ns))
        if name not in self._cached or self._cached[name][0] != state:
            self._cached[name] = state, read()
        return self._cached[name][1]


def number_in(query: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a whole number of a query. Raises CallError for any other text, or if it is missing without a default."""
    text = query.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise CallError(f"'{name}' must be a whole number, not '{text[:50]}'")
    return int(text)


class RunFolders:
    """The runs in and below ``roots``; one object per run, so that files are parsed once. With one root, a run's id is
    its path below it; with several, it begins with the last parts of the root's path, two or as many as differ."""

    def __init__(self, roots: Sequence[Path]) -> None:
        parts = {root.parts[1:]: root for root in roots}
        depth = next(n for n in count(2) if len({each[-n:] for each in parts}) == len(parts))
        self._roots = {Path(*each[-depth:]) if len(parts) > 1 else Path(): root for each, root in parts.items()}
        self._runs: dict[str, RunView] = {}

    def folders(self) -> dict[str, Path]:
        """Return the folders of the runs by their ids."""
        found_runs = ((prefix, find_runs(root)) for prefix, root in self._roots.items())
        return {str(prefix / name): folder for prefix, each in found_runs for name, folder in each.items()}

    def all(self) -> list[RunView]:
        self._runs = {name: self._runs.get(name) or RunView(folder, name) for name, folder in self.folders().items()}
        return list(self._runs.values())

    def get(self, run_id: str) -> RunView:
        """Return a run. Raises CallError for an unknown one, with the nearest name."""
        if run_id not in self._runs:
            self.all()
        if run_id not in self._runs:
            raise CallError(f"there is no run '{run_id}'{hint(run_id, self._runs)}")
        return self._runs[run_id]

    def rows(self) -> list[Plain]:
        return sorted(map(row_of, self.all()), key=lambda row: -row["started_s"])

    def diff(self, ids: Sequence[str]) -> Plain:
        """Return the settings that differ between runs."""
        settings = [self.get(run_id).settings() for run_id in ids]
        keys = sorted({key for each in settings for key in each})
        values = {key: [each.get(key) for each in settings] for key in keys}
        return {
            "settings": [{"key": key, "values": row} for key, row in values.items() if len(set(map(repr, row))) > 1]
        }


EMPTY_ROW: Plain = {
    **{"step": 0, "total_steps": 0, "last_step_s": 0.0, "reward": None, "spark": [], "goodput": None},
    **{"recoveries": None, "devices": 0, "started_s": 0.0, "elapsed_s": 0.0, "owner": "", "phase": "unknown"},
}
"""The row of a run without files."""


def row_of(run: RunView) -> Plain:
    """Return a run's row. Files that cannot be read must not hide the other runs: its row names the error."""
    try:
        return run.row()
    except Exception as error:  # noqa: BLE001 -- a job may write anything to its folder
        reason = f"its files cannot be read: {type(error).__name__}: {error}"
        return {**EMPTY_ROW, "id": run.run_id, "name": run.folder.name, "reason": reason}


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), inner)
    elif prefix:
        yield prefix, value if isinstance(value, str | int | float | bool | None) else json.dumps(value, default=str)


def _shifted(span: Any, begin_s: float) -> Plain:
    return {
        **{name: getattr(span, name) for name in ("kind", "label", "cause")},
        "phases": dict(span.phases),
        "begin_s": span.begin_s - begin_s,
        "end_s": span.end_s - begin_s,
    }


def _finite(row: Mapping[str, Any]) -> Plain:
    return {name: None if isinstance(value, float) and value != value else value for name, value in row.items()}
