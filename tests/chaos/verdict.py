# SPDX-License-Identifier: Apache-2.0
"""Checks of a disturbed run: it ends as the undisturbed one did, bit for bit, and leaves nothing behind."""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from dlrover.python.rl.common.names import NAMESPACE
from dlrover.python.rl.data.state_tree import dump
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore
from tests.chaos.gates import FOLDER
from tests.chaos.ledger import MEMORY, is_alive

TIMING = ("time/", "speed/", "memory/")
"""What the names of metrics that are times begin with: the only ones that may differ."""

_LISTEN = "0A"
_GRACE_S = 10.0
_LOOK_S = 0.2
_MOST = 5


def read_rows(path: Path) -> list[dict[str, Any]]:
    """A JSON Lines file; none when it is not there."""
    return [json.loads(line) for line in path.read_text().split("\n") if line] if path.exists() else []


# -- the same end -----------------------------------------------------------------------------------------------------


def differences(oracle: Path, chaos: Path, steps: int) -> list[str]:
    """Return the differences of two job directories; none if they hold the same run, bit for bit."""
    return [
        *step_faults(chaos, steps),
        *_metric_differences(oracle, chaos),
        *_row_differences("samples.jsonl", oracle, chaos),
        *_row_differences("held_out.jsonl", oracle, chaos),
        *sample_faults(chaos, steps),
        *_model_differences(oracle / "model", chaos / "model"),
        *_state_differences(oracle, chaos, steps),
    ]


def step_faults(job: Path, steps: int) -> Iterator[str]:
    """Steps that a run's metrics lack or repeat."""
    numbers = [row["step"] for row in read_rows(job / "metrics.jsonl") if row["step"]]
    if numbers != list(range(1, steps + 1)):
        yield f"metrics.jsonl holds the steps {numbers}, not 1 to {steps} once each"


def _metric_differences(oracle: Path, chaos: Path) -> Iterator[str]:
    rows = [
        [{name: row[name] for name in row if not name.startswith(TIMING)} for row in read_rows(job / "metrics.jsonl")]
        for job in (oracle, chaos)
    ]
    for left, right in zip(*rows, strict=False):
        if left != right:
            names = [name for name in left if left[name] != right.get(name)]
            yield f"metrics of step {left['step']} differ in {names}: {[(left[n], right.get(n)) for n in names]}"
            return


def _row_differences(name: str, oracle: Path, chaos: Path) -> Iterator[str]:
    left, right = read_rows(oracle / name), read_rows(chaos / name)
    if len(left) != len(right):
        yield f"{name} has {len(right)} rows, not {len(left)}"
    for number, (one, other) in enumerate(zip(left, right, strict=False), 1):
        if one != other:
            yield f"{name} differs first in row {number}: {one} became {other}"
            return


def sample_faults(chaos: Path, steps: int) -> Iterator[str]:
    """Samples that were trained on more than once, and steps without any."""
    keys = Counter((row["step"], row["prompt_id"], row["sample_index"]) for row in read_rows(chaos / "samples.jsonl"))
    if twice := [key for key, count in keys.items() if count > 1]:
        yield f"{len(twice)} samples were consumed more than once, first {twice[0]} (step, prompt, index)"
    if missing := set(range(1, steps + 1)) - {step for step, _, _ in keys}:
        yield f"no samples of the steps {sorted(missing)[:5]}"


def _model_differences(oracle: Path, chaos: Path) -> Iterator[str]:
    left, right = _digests(oracle), _digests(chaos)
    if not left or left.keys() != right.keys():
        yield f"the exported models have the files {sorted(left)} and {sorted(right)}"
    for name in left.keys() & right.keys():
        if left[name] != right[name]:
            yield f"model/{name} differs"


def _digests(folder: Path) -> dict[str, str]:
    files = [file for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _state_differences(oracle: Path, chaos: Path, steps: int) -> Iterator[str]:
    left, right = final_states(oracle), final_states(chaos)
    for _, states in (left, right):
        states.get("trainer", {}).pop("log", None)  # the name by which trackers know the run, another for each
    for name, (step, _) in (("undisturbed", left), ("disturbed", right)):
        if step != steps:
            yield f"the last checkpoint of the {name} run is of step {step}, not {steps}"
    if left[1].keys() != right[1].keys():
        yield f"the last checkpoints hold {sorted(left[1])} and {sorted(right[1])}"
    for name in sorted(left[1].keys() & right[1].keys()):
        differences = list(_tree_differences(name, left[1][name], right[1][name]))
        yield from differences[:_MOST]
        if len(differences) > _MOST:
            yield f"state {name} differs in {len(differences) - _MOST} more places"


def final_states(job_dir: Path) -> tuple[int, dict[str, Any]]:
    """Step and states of the newest valid checkpoint in a job's directory, by name (``"ACTOR-0"``, ``"trainer"``)."""
    for root in sorted((job_dir / "checkpoints").glob("*")):
        store = CheckpointStore(root, root.name, durable=True)
        manifest = next(filter(store.valid, store.manifests()), None)
        if manifest is not None:
            return manifest.step, {name: store.read(manifest, name) for name in manifest.files}
    return 0, {}


def _tree_differences(at: str, left: Any, right: Any) -> Iterator[str]:
    """The smallest parts of two trees that are not the same bits."""
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        for key in left:
            yield from _tree_differences(f"{at}.{key}", left[key], right[key])
        return
    if isinstance(left, list | tuple) and type(left) is type(right) and len(left) == len(right):
        for index, pair in enumerate(zip(left, right, strict=True)):
            yield from _tree_differences(f"{at}[{index}]", *pair)
        return
    one, other = dump(left), dump(right)
    if one.skeleton != other.skeleton or [bytes(b) for b in one.buffers] != [bytes(b) for b in other.buffers]:
        yield f"state {at} differs: {str(left)[:80]} and {str(right)[:80]}"


# -- nothing left -----------------------------------------------------------------------------------------------------


def leftovers(job: str, run: str, shared: Path, pids: set[int]) -> list[str]:
    """Return what is left of a run ten seconds after its end."""
    deadline_s = time.monotonic() + _GRACE_S
    while left := list(_left(job, run, shared, pids)):
        if time.monotonic() > deadline_s:
            return left
        time.sleep(_LOOK_S)
    return []


def _left(job: str, run: str, shared: Path, pids: set[int]) -> Iterator[str]:
    processes = _processes(shared) | {pid for pid in pids if is_alive(pid) and _is_worker(pid)}
    for pid in sorted(processes):
        yield f"process {pid}: {_command(pid)}"
    for port in sorted(_ports(processes)):
        yield f"port {port}"
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(f"{job}/"):
            yield f"actor {actor['name']}"
    for group in ray.util.placement_group_table().values():
        if group["name"].startswith(f"{job}/") and group["state"] != "REMOVED":
            yield f"placement group {group['name']} ({group['state']})"
    if (MEMORY / f"{job}-{run}").exists():
        yield f"shared memory {MEMORY / f'{job}-{run}'}"
    for path in (shared / "tmp").glob("*"):
        yield f"temporary file {path}"


def _processes(shared: Path) -> set[int]:
    mark = f"{FOLDER}={shared}".encode()
    return {pid for pid in _all_pids() if mark in _read(pid, "environ").split(b"\0") and pid != os.getpid()}


def _is_worker(pid: int) -> bool:
    return _read(pid, "cmdline").startswith(b"ray::")


def _all_pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")[:120]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _ports(pids: set[int]) -> set[int]:
    """TCP ports that these processes listen on."""
    inodes: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
            inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTEN and row[9] in inodes}


# -- work done again --------------------------------------------------------------------------------------------------


def redone_steps(executions: list[dict[str, Any]]) -> dict[int, int]:
    """Return how often each step was repeated: as often as every rollout worker generated again for it."""
    return _again(executions, min)


def repeated_calls(executions: list[dict[str, Any]]) -> dict[int, int]:
    """Return how many ``generate`` calls of each step were run more than once."""
    return _again(executions, sum)


def _again(executions: list[dict[str, Any]], fold: Callable[[list[int]], int]) -> dict[int, int]:
    generated = [(row["step"], row["who"]) for row in executions if row["method"] == "generate"]
    counts, members = Counter(generated), sorted({member for _, member in generated})
    again = {
        step: fold([max(counts[step, member] - 1, 0) for member in members]) for step in {step for step, _ in generated}
    }
    return {step: count for step, count in again.items() if count}
