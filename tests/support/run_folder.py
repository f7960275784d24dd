# SPDX-License-Identifier: Apache-2.0
"""The folder of a run that was never run: its journal, metrics, samples, logs and description, for those who look."""

import json
from pathlib import Path

from dlrover.python.rl.control import events
from dlrover.python.rl.control.events import Cause, CauseKind, Process, RoleSettings
from dlrover.python.rl.control.journal import encode
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore
from dlrover.python.rl.runtime.run.folder import Owner, encode_owner

BEGAN_S = 1_800_000_000.0
STEP_S = 2.0
PART_STEPS = 100

DIED = Cause(CauseKind.PROCESS_DIED, "ROLLOUT[1]", "killed by signal 9", "Fatal Python error\nin generate")


def write_run(
    folder: Path, steps: int = 20, samples: int = 4, lost_at: int = 7, cost_s: float | None = 3.0, ended: bool = True
) -> Path:
    """Write a run that lost ROLLOUT[1] in step ``lost_at``, 0 for none, and continued ``cost_s`` later; None: it has
    made no progress since."""
    (folder / "logs").mkdir(parents=True)
    (folder / "samples").mkdir()
    write_journal(folder, steps, lost_at, cost_s, ended)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(metrics_of(step)) + "\n")
    for first in range(1, steps + 1, PART_STEPS):
        part = range(first, min(first + PART_STEPS, steps + 1))
        text = "".join(json.dumps(sample_of(step, each)) + "\n" for step in part for each in range(samples))
        newest = first + PART_STEPS > steps
        name = "samples.jsonl" if newest else f"samples/steps-{first:06}.jsonl"
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "job.yaml").write_text(f"name: {folder.name}\nconfig:\n  steps: {steps}\n  lr: 0.001\n", encoding="utf-8")
    owner = Owner(folder.name, "abcd1234", "Ray", "host-a", "", 0, "", BEGAN_S, 3600.0, "", ())
    record = Owner(**{**vars(owner), "state": "finished" if ended else "running"})
    (folder / "owner.1.json").write_bytes(encode_owner(record))
    log = "--- trainer, pid 7 on host-a, 2027-01-15 08:00:00\n08:00:01 I step 1\n08:00:05 W <b>slow</b> \x1b[31mred\n"
    (folder / "logs/trainer.log").write_text(log, encoding="utf-8")
    return folder


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


def write_journal(folder: Path, steps: int, lost_at: int, cost_s: float | None, ended: bool) -> None:
    roles = {"ACTOR": RoleSettings(1), "ROLLOUT": RoleSettings(2)}
    recorded = [
        (0.0, events.Submitted(folder.name, roles, "abcd1234")),
        (0.1, events.MasterStarted("n1", 1)),
        (0.5, events.Placed(1)),
    ]
    for number, (role, rank) in enumerate((("ACTOR", 0), ("ROLLOUT", 0), ("ROLLOUT", 1))):
        place = Process("n1", 100 + number, "host-a", devices=str(number))
        recorded.append((1.0, events.MemberStarted(role, rank, 1, place)))
    recorded += [(1.2, events.TrainerStarted(1, Process("n1", 99, "host-a"))), (2.0, events.StepsOpened(1))]
    if lost_at:
        lost_s = 2.0 + STEP_S * (lost_at - 1) + 0.5
        place = Process("n1", 200, "host-a", devices="2")
        recorded += [
            (lost_s, events.MemberLost("ROLLOUT", 1, 1, DIED)),
            (lost_s + 1.0, events.MemberStarted("ROLLOUT", 1, 2, place)),
        ]
        recorded += [(lost_s + cost_s, events.Progressed(1, lost_at))] if cost_s else []
    if ended:
        end_s = 2.0 + STEP_S * steps + (cost_s or 0.0)
        recorded += [(end_s, events.TrainerFinished(1)), (end_s + 0.5, events.Released(1))]
    store = FileStateStore(folder / "journal.jsonl")
    store.append(*(encode(BEGAN_S + at_s, event) for at_s, event in recorded))
    store.close()
