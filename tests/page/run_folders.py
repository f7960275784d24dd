# SPDX-License-Identifier: Apache-2.0
"""Folders of three runs that were never executed, with all that the page shows: one runs, one has ended, one failed."""

import json
import math
import random
import time
from pathlib import Path

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.events import Cause, CauseKind
from tests.support.recorded_spans import Recording
from tests.support.run_files import write_rows
from tests.support.run_folder import write_description, write_journal, write_owner, write_samples

EVIL = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>\x1b[31m../../etc"
STEP_S, START_S, LOST_AT, COST_S = 8.4, 42.0, 63, 31.0
SPANS_FROM = 100  # earlier steps have none
ROLES = {"ACTOR": 2, "ROLLOUT": 4, "REWARD": 2}
WORKERS = [str(ProcessId(role, rank)) for role, count in ROLES.items() for rank in range(count)]
CALLS = [
    ("ROLLOUT", "generate", 4.1),
    ("REWARD", "score", 0.9),
    ("ACTOR", "update", 2.2),
    ("ACTOR", "send_weights", 0.6),
]
RAISED = Cause(CauseKind.USER_ERROR, "trainer", f"ValueError: no reward for {EVIL}", "Traceback\n  in fit")


def write_runs(root: Path) -> dict[str, Path]:
    """Return the folders by their names: ``grpo`` runs, ``grpo-large`` has finished, ``ppo`` has failed."""
    runs = {
        "grpo": ("running", 120, 500, 1e-6),
        "grpo-large": ("finished", 200, 200, 3e-6),
        "ppo": ("failed", 80, 300, 1e-6),
    }
    for name, (phase, steps, total, lr) in runs.items():
        write_run(root / name, phase, steps, {"steps": total, "lr": lr, "note": EVIL})
    return {name: root / name for name in runs}


def write_run(folder, phase, steps, config):
    for name in ("logs", "evaluations"):
        (folder / name).mkdir(parents=True)
    began_s = time.time() - STEP_S * steps - (45 if phase == "running" else 90_000)
    times = {"began_s": began_s, "start_s": START_S, "step_s": STEP_S, "lost_at": LOST_AT, "cost_s": COST_S}
    write_journal(folder, ROLES, steps, phase, raised=RAISED, **times)
    write_owner(folder, began_s, phase)
    write_description(folder, config=config, roles=ROLES)
    write_rows(folder / "metrics.jsonl", (metrics_of(folder.name, step) for step in range(steps + 1)))
    write_rows(folder / "metrics.superseded.jsonl", (metrics_of("repeated", step) for step in (61, 62)))
    write_samples(folder, steps, samples_of)
    for step in range(0, steps + 1, 20):
        write_rows(folder / f"evaluations/step-{step:06}.jsonl", evaluation_of(step))
    write_spans(folder, began_s, steps)
    if phase == "running":
        write_live(folder)
    for process in ("trainer", "rollout-0", "rollout-1", "actor-0"):
        write_log(folder / f"logs/{process}.log", process, began_s, steps)


def write_live(folder):
    """Write the heartbeats and the calls of the workers, as the master of a live run does."""
    processes = {"trainer": [0.2, None, None]}
    for worker in WORKERS:
        processes[worker] = [0.4, "generate", 2.4] if worker.startswith("ROLLOUT") else [0.4, None, None]
    (folder / "live.json").write_text(json.dumps({"at_s": time.time(), "processes": processes}), encoding="utf-8")


def write_log(path, process, began_s, steps):
    clock = lambda at_s: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))  # noqa: E731
    lines = [f"--- {process}, pid 4100 on node-a, {clock(began_s)}"]
    for step in range(1, steps + 1):
        text = f"W the reward of a sample is not finite: {EVIL}" if step == 31 else f"I step {step} of {process}"
        lines.append(f"{clock(began_s + 42 + step * STEP_S)} {text}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def metrics_of(name, step):
    noise, rise = random.Random(f"{name}{step}"), 1 / (1 + math.exp(-(step - 60) / 25))
    evaluation = {} if step % 20 else {"eval/accuracy": round(0.08 + 0.8 * rise, 3)}
    if not step:
        return {"step": 0, **evaluation}
    times = {
        "time/generation": 4.1 + noise.gauss(0, 0.1), "time/reward": 0.9, "time/sync": 0.6, "time/commit": 0.3,
        "time/update": 2.2 + noise.gauss(0, 0.05), "time/trainer": 0.3,
    }  # fmt: skip
    return {
        "step": step, **evaluation,
        "loss": 0.4 * math.exp(-step / 90) + noise.gauss(0, 0.02), "grad_norm": 0.8 + noise.random() * 0.4, "lr": 1e-6,
        "reward/mean": 0.1 + 0.75 * rise + noise.gauss(0, 0.03), "reward/std": 0.3 + noise.gauss(0, 0.02),
        "policy/entropy": 1.6 * math.exp(-step / 200) + noise.gauss(0, 0.02), "policy/kl": 0.002 * step ** 0.5,
        "completions/length_mean": 90 + 110 * rise + noise.gauss(0, 4), "completions/truncated": noise.random() / 20,
        "time/step": math.fsum(times.values()), **times, "speed/tokens_per_s": 5200 + noise.gauss(0, 90),
    }  # fmt: skip


def samples_of(step):
    noise = random.Random(step)
    for at in range(32):
        prompt, index = divmod(at, 8)
        reward = None if at == 9 else float(noise.random() < 0.3 + step / 400)
        text = f"I add the tens first: 40 + 10 is 50, then {prompt} + {index}. So the answer is {50 + prompt + index}."
        if prompt == 2:
            text = (
                f'<think>A tool is safer.</think>\n<tool_call>{{"name": "add", "arguments": {{"x": "42+{index}"}}}}'
                f"</tool_call><|im_end|>\n<|im_start|>tool\n<tool_response>{52 + index}</tool_response><|im_end|>\n"
                f"<|im_start|>assistant\nThe answer is {52 + index}.<|im_end|>"
            )
        row = {
            "step": step, "prompt_id": prompt, "sample_index": index, "retry": 0, "trajectory": at, "reward": reward,
            "error": f"the verifier raised ValueError: {EVIL}" if at == 9 else None, "version": step - 1,
            "min_version": step - 1, "staleness": 0, "reward/format": 1.0, "advantage": reward and reward - 0.5,
            "mark": "failed" if at == 9 else "filtered" if prompt == 3 else "",
            "reason": "all rewards are equal" if prompt == 3 else "", "prompt_tokens": 24,
            "completion_tokens": 20 + noise.randrange(60), "turns": 1 + (prompt == 2), "rank": at % 2, "update": 0,
            "micro_batch": at // 16, "prompt": f"What is 4{prompt} + 1{prompt}?{EVIL if prompt == 3 else ''}",
            "completion": text + (EVIL if prompt == 3 else ""), "answer": str(50 + 2 * prompt),
        }  # fmt: skip
        if at < 4:
            row["tokens"] = [f" {word}" if number else word for number, word in enumerate(text.split(" "))]
            for name, value in (("logprobs", 0.0), ("old_logprobs", 0.0), ("advantages", 0.3)):
                row[f"token_{name}"] = [value - noise.expovariate(2) for _ in row["tokens"]]
        yield row


def evaluation_of(step):
    for prompt in range(12):
        is_right = step > 20 + 10 * prompt
        answer = prompt * 4 if is_right else prompt + step
        yield {
            "step": step, "prompt_id": prompt, "reward": float(is_right), "prompt": f"What is {prompt} + {prompt * 3}?",
            "completion": f"It is {answer}. {EVIL if prompt == 5 else ''}", "answer": str(prompt * 4),
        }  # fmt: skip


def write_spans(folder, began_s, steps):
    """Write the calls of the last steps: ROLLOUT[2] takes much longer than its peers in every second one."""
    recording = Recording(folder, WORKERS, began_s)
    for step in range(max(1, min(SPANS_FROM, steps - 20)), steps + 1):
        begin_s = at_s = began_s + START_S + 1.0 + (step - 1) * STEP_S
        sources = []
        for number, (role, method, seconds) in enumerate(CALLS):
            ranks = list(range(ROLES[role]))
            recording.add("trainer", "issue", step, number, role, ranks, method, at_s, sources)
            for rank in ranks:
                slow = method != "generate" or (rank == 2 and step % 2 == 0)
                spent_s = seconds - 0.02 if slow else seconds * (0.45 if step % 2 == 0 else 0.93) + rank * 0.03
                phases = {"prefill": spent_s * 0.2, "decode": spent_s * 0.75} if method == "generate" else None
                times = at_s + 0.01, at_s + 0.01 + spent_s
                recording.call(f"{role}[{rank}]", (step, number), method, *times, phases)
            recording.add("trainer", "wait", role, method, at_s + 0.01, at_s + seconds)
            at_s, sources = at_s + seconds + 0.05, [f"{role}.{method}"]
        recording.add("trainer", "step", step, begin_s, begin_s + STEP_S)
    recording.write()
