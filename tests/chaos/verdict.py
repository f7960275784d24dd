# SPDX-License-Identifier: Apache-2.0
"""Checks of a disturbed run: it ends as the undisturbed one did, bit for bit, and leaves nothing behind."""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from dlrover.python.rl.common.names import NAMESPACE
from dlrover.python.rl.data.prompts import load_prompts
from dlrover.python.rl.data.sampler import PromptCursor
from dlrover.python.rl.data.source import hold_out
from dlrover.python.rl.data.state_tree import dump
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore
from tests.chaos.gates import FOLDER
from tests.chaos.ledger import MEMORY, is_alive
from tests.support.commands import command_of, listening
from tests.support.run_files import TIMES

_GRACE_S = 10.0
_LOOK_S = 0.2
_MOST = 5


def read_rows(path: Path) -> list[dict[str, Any]]:
    """A JSON Lines file; none when it is not there."""
    return [json.loads(line) for line in path.read_text().split("\n") if line] if path.exists() else []


def differences(oracle: Path, chaos: Path, steps: int) -> list[str]:
    """Return the differences of two job directories; none if they hold the same run, bit for bit."""
    return [
        *step_faults(chaos, steps),
        *_metric_differences(oracle, chaos),
        *row_differences("samples.jsonl", oracle, chaos),
        *row_differences("held_out.jsonl", oracle, chaos),
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
        [{name: row[name] for name in row if not name.startswith(TIMES)} for row in read_rows(job / "metrics.jsonl")]
        for job in (oracle, chaos)
    ]
    for left, right in zip(*rows, strict=False):
        if left != right:
            names = [name for name in left if left[name] != right.get(name)]
            yield f"metrics of step {left['step']} differ in {names}: {[(left[n], right.get(n)) for n in names]}"
            return


def row_differences(name: str, oracle: Path, chaos: Path) -> Iterator[str]:
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


def violations(job_dir: Path, config: Any) -> list[str]:
    """Return the violations of a finished run whose rollouts ran ahead. Which samples a step trains on depends on what
    was fast there, so its bits are its own; but each problem is trained on once, in time, and every step with a whole
    batch."""
    rows = read_rows(job_dir / "samples.jsonl")
    return [
        *step_faults(job_dir, config.steps),
        *sample_faults(job_dir, config.steps),
        *_batch_faults(rows, config),
        *_problem_faults(rows, config),
        *_stale_rows(rows, config.rollout.max_staleness),
        *_end_faults(job_dir, config.steps),
    ]


def _batch_faults(rows: list[dict[str, Any]], config: Any) -> Iterator[str]:
    wanted = config.prompts_per_step * config.rollout.samples_per_prompt
    for step, count in sorted(Counter(row["step"] for row in rows).items()):
        if count != wanted:
            yield f"step {step} was trained on {count} samples, not {wanted}"


def _problem_faults(rows: list[dict[str, Any]], config: Any) -> Iterator[str]:
    """Rollouts run ahead by whole steps, so in all each problem comes as often as in a run without staleness."""
    prompts = load_prompts(str(config.data.train))
    train, _ = hold_out([row.prompt for row in prompts], config.data.eval_rows, config.seed)
    cursor = PromptCursor(len(train), config.prompts_per_step, config.seed)
    rows_in_order = chain.from_iterable(cursor.next() for _ in range(config.steps))
    wanted = Counter(train[row] for row in rows_in_order)
    counts = Counter(row["row"] for row in rows if row["sample_index"] == 0)
    if missing := wanted - counts:
        yield f"{missing.total()} groups were drawn from the data and never trained on: {sorted(missing)[:5]}"
    if more := counts - wanted:
        yield f"{more.total()} groups were trained on once too often: {sorted(more)[:5]}"


def _stale_rows(rows: list[dict[str, Any]], max_staleness: int) -> Iterator[str]:
    """Every step makes a version, so the rows of step ``n`` are trained on weights of version ``n - 1``."""
    stale = np.array([row["step"] - 1 - row["min_version"] for row in rows])
    if len(stale) and (stale.max() > max_staleness or stale.min() < 0):
        at = rows[int(np.argmax(stale))]
        yield f"staleness reaches from {stale.min()} to {stale.max()}, {max_staleness} allowed: first {at}"
    if len(stale) and not stale.any():
        yield "no sample was ever behind: nothing has run ahead"


def _end_faults(job_dir: Path, steps: int) -> Iterator[str]:
    step, states = final_states(job_dir)
    if step != steps:
        yield f"the last checkpoint is of step {step}, not {steps}"
    if states and states["trainer"]["staleness"]["object"]["open"]:
        yield f"groups are under way at the end: {states['trainer']['flight']['object']['open']}"
    if not (job_dir / "model" / "config.json").is_file():
        yield "no model was exported"


def leftovers(job: str, run: str, shared: Path, pids: set[int]) -> list[str]:
    """Return what is left of a run ten seconds after its end."""
    deadline_s = time.monotonic() + _GRACE_S
    while left := list(_left(job, run, shared, pids)):
        if time.monotonic() > deadline_s:
            return left
        time.sleep(_LOOK_S)
    return []


def _left(job: str, run: str, shared: Path, pids: set[int]) -> Iterator[str]:
    processes = _processes(shared) | {pid for pid in pids if is_alive(pid) and command_of(pid).startswith("ray::")}
    for pid in sorted(processes):
        yield f"process {pid}: {command_of(pid)[:120]}"
    for address in sorted(listening(processes)):
        yield f"listens at {address}"
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
    processes = psutil.process_iter(["environ"])  # None of what has ended, or is another user's
    started = {process.pid for process in processes if (process.info["environ"] or {}).get(FOLDER) == str(shared)}
    return started - {os.getpid()}


def redone_steps(executions: list[dict[str, Any]]) -> dict[int, int]:
    """Return how often each step was repeated: as often as every rollout worker generated again for it."""
    counts = Counter((row["step"], row["who"]) for row in executions if row["method"] == "generate")
    steps, members = ({key[at] for key in counts} for at in (0, 1))
    again = {step: min(counts[step, member] for member in members) - 1 for step in steps}
    return {step: count for step, count in again.items() if count > 0}
