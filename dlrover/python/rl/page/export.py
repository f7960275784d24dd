# SPDX-License-Identifier: Apache-2.0
"""A run as one HTML file: the page with its styles, scripts and answers inside."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlencode

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.page.app import ANSWERS, STATIC
from dlrover.python.rl.page.run_data import Plain, RunFolders

_STEPS, _MARKED_STEPS, _PROMPTS = 20, 100, 50
_MOST_CHARS = 2000
_STYLE = re.compile(r'<link rel="stylesheet" href="static/([\w.]+)">')
_SCRIPT = re.compile(r'<script src="static/([\w.]+)"(?: defer)?></script>')


def export(folder: Path) -> str:
    """Return the page of the run in ``folder`` as one HTML text. It has all curves, the last 20 steps and those with
    marks, with up to 200 samples each, and the last 2,000 events."""
    runs = RunFolders([folder])
    answers = {request: _cut(answer) for request, answer in _answers(runs)}
    # "<" cannot begin an end tag inside the script.
    content = json.dumps(answers, separators=(",", ":")).replace("<", "\\u003c")
    scripts: list[str] = []

    def inline_script(match: re.Match[str]) -> str:
        scripts.append((STATIC / match[1]).read_text(encoding="utf-8").replace("</script", "<\\/script"))
        return f"<script>{scripts[-1]}</script>"

    page = (STATIC / "index.html").read_text(encoding="utf-8")
    page = _STYLE.sub(lambda match: f"<style>{(STATIC / match[1]).read_text(encoding='utf-8')}</style>", page)
    page = _SCRIPT.sub(inline_script, page)
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    data = f'<script type="application/json" id="answers">{content}</script>'
    return page.replace("<head>", f"<head>{head}", 1).replace("</head>", f"{data}</head>", 1)


def _answers(runs: RunFolders) -> Iterator[tuple[str, Plain]]:
    """Yield requests with their answers. A request that has none, such as for samples of a recipe without any, is left
    out."""

    def ask(name: str, limits: Mapping[str, str] | None = None, **query: object) -> Iterator[tuple[str, Plain]]:
        texts = {key: str(query[key]) for key in sorted(query)}
        try:
            answer = ANSWERS[name](runs, {**texts, **(limits or {})})
            yield f"api/{name}?{urlencode(texts)}" if texts else f"api/{name}", answer
        except CallError:
            return

    yield from ask("runs")
    for name in ("run", "metrics", "marks"):
        yield from ask(name, id=".")
    run = runs.get(".")
    yield from ask("curves", {"points": "2000"}, id=".")
    marked = {mark["step"] for mark in run.marks()["marks"]}
    last = run.version()["step"] + 1  # may have begun
    steps = sorted({*range(max(last - _STEPS, 1), last + 1), *sorted(marked)[-_MARKED_STEPS:]})
    for step in steps:
        yield from ask("step", id=".", step=step)
        yield from ask("samples", {"limit": "200"}, id=".", step=step)
    yield from ask("evaluations", id=".")
    for each in run.evaluations()["prompts"][:_PROMPTS]:
        yield from ask("evaluations", id=".", prompt=each["prompt_id"])
    yield from ask("events", {"limit": "2000"}, id=".")


def _cut(value: object) -> object:
    """Shorten the long texts in an answer."""
    if isinstance(value, str):
        return value if len(value) <= _MOST_CHARS else f"{value[:_MOST_CHARS]}... ({len(value)} characters)"
    if isinstance(value, dict):
        return {key: _cut(item) for key, item in value.items()}
    return [_cut(item) for item in value] if isinstance(value, list | tuple) else value
