# SPDX-License-Identifier: Apache-2.0
"""Files of spans for the tests of their readers: steps of two rollouts and an actor."""

import json
from pathlib import Path

from dlrover.python.rl.control.events import Cause, MemberLost
from tests.support.run_folder import append_events

BEGAN_S = 1_795_000_000.0


class Recording:
    """A run's spans: each step begins a second after the last one, with 0.4 s of sampling and 0.5 s of an update."""

    def __init__(self, folder, workers=("ACTOR[0]", "ROLLOUT[0]", "ROLLOUT[1]"), began_s=BEGAN_S):
        self.folder, self.workers, self.now_s = Path(folder), workers, began_s
        self.lines = {}
        for process in ("trainer", *workers):
            self.start(process)

    def add(self, process, *line):
        self.lines.setdefault(process, []).append(list(line))

    def start(self, process, attempt=1, at_s=None, pid=7):
        self.add(process, "process", process, attempt, pid, "node", self.now_s if at_s is None else at_s)

    def call(self, process, call_id, method, begin_s, end_s, phases=None, error="", behind_s=0.0):
        self.add(process, "call", *call_id, method, begin_s - behind_s, end_s - behind_s, phases, error)

    def step(self, number, seconds=None, own_s=0.0, behind_s=0.0):
        """Add a step of the actor and the rollouts, which sample for ``seconds`` and whose clocks are ``behind_s``."""
        began_s = at_s = self.now_s
        seconds = seconds or [0.4] * (len(self.workers) - 1)
        self.add("trainer", "issue", number, 0, "ROLLOUT", list(range(len(seconds))), "sample", at_s, [])
        for rank, each_s in enumerate(seconds):
            process, phases = f"ROLLOUT[{rank}]", {"decode": each_s / 2}
            self.call(process, (number, 0), "sample", at_s + 0.001, at_s + each_s, phases, "", behind_s)
        self.add("trainer", "issue", number, 1, "ACTOR", [0], "update", at_s + 0.002, ["ROLLOUT.sample"])
        at_s += max(seconds)
        self.call("ACTOR[0]", (number, 1), "update", at_s + 0.001, at_s + 0.5, None, "", behind_s)
        self.add("trainer", "wait", "ACTOR", "update", began_s + 0.003, at_s + 0.501)
        self.now_s = max(began_s + 1.0, at_s + 0.6) + own_s
        self.add("trainer", "step", number, began_s, self.now_s)
        return self

    def write(self):
        folder = self.folder / "spans"
        folder.mkdir(parents=True, exist_ok=True)
        for process, lines in self.lines.items():
            name = process.lower().replace("[", "-").rstrip("]")
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        return self.folder


def labels(lane):
    return [span.label for span in lane.spans]


def write_loss(folder, at_s, kind):
    cause = Cause(kind, "ROLLOUT[1]", "it is gone")
    append_events(folder, at_s, [(0.0, MemberLost("ROLLOUT", 1, 1, cause))])


def lose_rollout(recording, number):
    """Add a step in which ROLLOUT[1] is lost in its call, and repeats it two seconds later."""
    recording.step(number, [0.4, 3.0])
    began_s = recording.now_s - 3.6
    recording.lines["ROLLOUT[1]"].pop()
    recording.start("ROLLOUT[1]", 2, began_s + 2.2, pid=8)
    recording.call("ROLLOUT[1]", (-1, -1), "__init__", began_s + 2.3, began_s + 2.5)
    issue = ["issue", number, 0, "ROLLOUT", [1], "sample", began_s + 2.6, []]
    recording.lines["trainer"].insert(-1, issue)  # before the end of the step
    recording.call("ROLLOUT[1]", (number, 0), "sample", began_s + 2.6, began_s + 3.0)
    return began_s
