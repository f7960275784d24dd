# SPDX-License-Identifier: Apache-2.0
"""The folder of a run that was never run: its journal, metrics, samples, logs and description, for those who look."""

from collections.abc import Callable, Iterable
from pathlib import Path

import yaml

from dlrover.python.rl.control import events
from dlrover.python.rl.control.events import Cause, CauseKind, Process, RoleSettings
from dlrover.python.rl.control.journal import encode
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore
from dlrover.python.rl.runtime.run.folder import Owner, encode_owner
from tests.support.run_files import write_rows

BEGAN_S = 1_800_000_000.0
STEP_S = 2.0
PART_STEPS = 100
ROLES = {"ACTOR": 1, "ROLLOUT": 2}

DIED = Cause(CauseKind.PROCESS_DIED, "ROLLOUT[1]", "killed by signal 9", "Fatal Python error\nin generate")
RAISED = Cause(CauseKind.USER_ERROR, "trainer", "ValueError: no reward", "Traceback\n  in fit")


def write_run(
    folder: Path, steps: int = 20, samples: int = 4, lost_at: int = 7, cost_s: float | None = 3.0, ended: bool = True
) -> Path:
    """Write a run that lost ROLLOUT[1] in step ``lost_at``, 0 for none, and continued ``cost_s`` later; None: it has
    made no progress since."""
    (folder / "logs").mkdir(parents=True)
    phase = "finished" if ended else "running"
    write_owner(folder, BEGAN_S, phase)
    write_journal(folder, ROLES, steps, phase, lost_at=lost_at, cost_s=cost_s)
    write_description(folder, config={"steps": steps, "lr": 0.001})
    write_rows(folder / "metrics.jsonl", map(metrics_of, range(1, steps + 1)))
    write_samples(folder, steps, lambda step: [sample_of(step, number) for number in range(samples)])
    log = "--- trainer, pid 7 on host-a, 2027-01-15 08:00:00\n08:00:01 I step 1\n08:00:05 W <b>slow</b> \x1b[31mred\n"
    (folder / "logs/trainer.log").write_text(log, encoding="utf-8")
    return folder


def write_owner(folder: Path, began_s: float, phase: str) -> None:
    values = folder.name, "abcd1234", "Ray", "host-a", "", 0, "", began_s, 3600.0, "", (), phase
    owner = Owner(*values, user="ada")
    (folder / "owner.1.json").write_bytes(encode_owner(owner))


def write_description(folder: Path, **keys: object) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump({"name": folder.name, **keys}), encoding="utf-8")


def write_samples(folder: Path, steps: int, rows_of: Callable[[int], Iterable[dict[str, object]]]) -> None:
    """Write the rows of each step; ``samples.jsonl`` has the newest part of them."""
    (folder / "samples").mkdir()
    for first in range(1, steps + 1, PART_STEPS):
        end = first + PART_STEPS
        name = "samples.jsonl" if end > steps else f"samples/steps-{first:06}.jsonl"
        write_rows(folder / name, (row for step in range(first, min(end, steps + 1)) for row in rows_of(step)))


def metrics_of(step: int) -> dict[str, float | int | None]:
    return {
        "step": step,
        "reward/mean": step / 100,
        "loss": 1.0 / step,
        "grad_norm": None if step == 3 else 0.5,
        "time/step": STEP_S,
        "time/generation": 1.2,
        "time/update": 0.5,
        "time/trainer": 0.3,
    }


def sample_of(step: int, number: int) -> dict[str, object]:
    return {
        "step": step,
        "prompt_id": number // 2,
        "sample_index": number % 2,
        "reward": float(number),
        "reward/exact": float(number),
        "error": "it broke" if number == 1 else None,
        "mark": "failed" if number == 1 else "",
        "advantage": number - 1.5,
        "version": step - 1,
        "rank": number % 2,
        "prompt": f"What is {number}?",
        "completion": f"<script>alert({number})</script> answer {number}" * (1 + number % 2),
    }


def write_journal(
    folder: Path, roles: dict[str, int], steps: int, phase: str, *, began_s: float = BEGAN_S, start_s: float = 2.0,
    step_s: float = STEP_S, lost_at: int = 0, cost_s: float | None = None, raised: Cause = RAISED,
) -> None:  # fmt: skip
    """Write a journal whose first step begins after ``start_s``; ``raised`` is the cause of the phase ``failed``."""

    def place_of(role: str, rank: int, pid: int) -> Process:
        device = rank + (roles["ACTOR"] if role == "ROLLOUT" else 0)
        return Process(f"n{rank % 2}", pid, f"host-{'ab'[rank % 2]}", devices="" if role == "REWARD" else str(device))

    workers = [(role, rank) for role, count in roles.items() for rank in range(count)]
    settings = {role: RoleSettings(count) for role, count in roles.items()}
    recorded: list[tuple[float, events.Event]] = [
        (0.0, events.Submitted(folder.name, settings, "abcd1234")),
        (0.1, events.MasterStarted("n0", 1)),
        (0.2 * start_s, events.Placed(1)),
    ]
    for number, worker in enumerate(workers):
        recorded.append((0.5 * start_s, events.MemberStarted(*worker, 1, place_of(*worker, 100 + number))))
    recorded += [(0.6 * start_s, events.TrainerStarted(1, Process("n0", 99, "host-a")))]
    recorded += [(start_s, events.StepsOpened(1))]
    if lost_at:
        lost_s = start_s + step_s * (lost_at - 1) + 0.5
        recorded += [(lost_s, events.MemberLost("ROLLOUT", 1, 1, DIED))]
        recorded += [(lost_s + 1.0, events.MemberStarted("ROLLOUT", 1, 2, place_of("ROLLOUT", 1, 200)))]
        recorded += [(lost_s + cost_s, events.Progressed(1, lost_at))] if cost_s else []
    if phase != "running":
        end_s = start_s + step_s * steps + (cost_s or 0.0)
        end = events.TrainerLost(1, raised) if phase == "failed" else events.TrainerFinished(1)
        recorded += [(end_s, end), (end_s + 0.5, events.Released(1))]
    append_events(folder, began_s, recorded)


def append_events(folder: Path, began_s: float, recorded: Iterable[tuple[float, events.Event]]) -> None:
    """Append events to a journal, each with its seconds since ``began_s``."""
    store = FileStateStore(folder / "journal.jsonl")
    store.append(*(encode(began_s + at_s, event) for at_s, event in recorded))
    store.close()
