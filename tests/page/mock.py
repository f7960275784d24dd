# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the page's server: its answers for three runs that were never executed, live and finished.

``python -m tests.page.mock`` serves them.
"""

import json
import math
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

STATIC = Path(__file__).parents[2] / "dlrover/python/rl/page/static"
NOW_S = float(int(time.time()))
EVIL = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>\x1b[31m../../etc"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html; charset=utf-8"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
RUNS = {
    "grpo/20261129-101502-a1": ("grpo", "ada", "running", 120, 500),
    "grpo-large/20261128-090000-b2": ("grpo-large", "ada", "finished", 200, 200),
    "ppo/20261127-180000-c3": (f"ppo {EVIL}", "grace", "failed", 80, 300),
}
LIVE = next(iter(RUNS))
METRICS = [
    "reward/mean", "reward/std", "loss", "grad_norm", "lr", "policy/entropy", "policy/kl", "policy/clip_fraction",
    "completions/length_mean", "completions/truncated", "eval/accuracy", "time/step", "time/generation", "time/update",
    "time/reward", "time/sync", "speed/tokens_per_s",
]  # fmt: skip


def curve(name, step, noise):
    rise = 1 / (1 + math.exp(-(step - 60) / 25))
    if name.startswith("eval/") and step % 20:
        return None
    table = {
        "reward/mean": 0.1 + 0.75 * rise + noise.gauss(0, 0.03),
        "eval/accuracy": 0.08 + 0.8 * rise,
        "loss": 0.4 * math.exp(-step / 90) + noise.gauss(0, 0.02),
        "grad_norm": 0.8 + noise.random() * 0.4,
        "policy/entropy": 1.6 * math.exp(-step / 200) + noise.gauss(0, 0.02),
        "completions/length_mean": 90 + 110 * rise + noise.gauss(0, 4),
        "time/step": 8.4 + noise.gauss(0, 0.3) + (31 if step == 63 else 0),
    }
    return table.get(name, abs(noise.gauss(0.05, 0.02)))


def row(run_id, step_bonus=0):
    name, owner, phase, step, total = RUNS[run_id]
    noise = random.Random(run_id)
    step += step_bonus
    return {
        "id": run_id, "name": name, "owner": owner, "phase": phase, "step": step, "total_steps": total,
        "last_step_s": NOW_S - (4 if phase == "running" else 86_400), "reward": round(curve("reward/mean", step, noise), 4),
        "spark": [curve("reward/mean", step * at / 50, noise) for at in range(50)], "goodput": 0.934,
        "recoveries": 2, "devices": 8, "started_s": NOW_S - 5000, "elapsed_s": 1210.0,
        "reason": "ROLLOUT[1] was lost three times" if phase == "failed" else "",
    }  # fmt: skip


def members(phase):
    state = "up" if phase == "running" else "ended"
    for at, (role, count) in enumerate({"ACTOR": 2, "ROLLOUT": 4, "REWARD": 2}.items()):
        for rank in range(count):
            yield {
                "process": f"{role.lower()}-{rank}", "role": role, "rank": rank, "node": f"node-{rank % 2}",
                "pid": 4000 + 100 * at + rank, "devices": [str(at * 2 + rank // 2)] if role != "REWARD" else [],
                "state": "lost" if (role, rank) == ("ROLLOUT", 3) and state == "up" else state,
                "heartbeat_age_s": 0.4 + rank, "call": "generate" if role == "ROLLOUT" else None,
                "call_s": 3.2 if role == "ROLLOUT" else None,
            }  # fmt: skip


def run(run_id, bonus=0):
    whole = row(run_id, bonus)
    end = NOW_S - (0 if whole["phase"] == "running" else 80_000)
    uses = [("start", "", 42.0), ("useful", "", 510.0), ("recovery", "process_died", 31.0), ("useful", "", 300.0),
            ("restart", "node_lost", 64.0), ("useful", "", 263.0)]  # fmt: skip
    strip, at = [], end - sum(seconds for *_, seconds in uses)
    for use, cause, seconds in uses:
        strip.append({"use": use, "cause": cause, "begin_s": at, "end_s": at + seconds})
        at += seconds
    totals = {}
    for use, cause, seconds in uses:
        totals[use, cause] = totals.get((use, cause), 0) + seconds
    failed = whole["phase"] == "failed"
    return whole | {
        "folder": f"/data/runs/{run_id}", "roles": {"ACTOR": 2, "ROLLOUT": 4, "REWARD": 2},
        "members": list(members(whole["phase"])), "cause": "process_died" if failed else "",
        "message": f"ROLLOUT[1] was killed by signal 9 {EVIL}" if failed else "", "detail": "line 1\nline 2" if failed else "",
        "try": ["Read logs/rollout-1.log.", "Raise roles.ROLLOUT.memory_gib."] if failed else [],
        "strip": strip, "uses": [{"use": use, "cause": cause, "seconds": s} for (use, cause), s in totals.items()],
        "settings": {"algorithm.name": whole["name"], "train.lr": 1e-6, "train.steps": whole["total_steps"]},
    }  # fmt: skip


def curves(run_id, names, bonus=0):
    last = RUNS[run_id][3] + bonus
    steps = list(range(last + 1))
    noise = {name: random.Random(run_id + name) for name in names}
    series = {name: [curve(name, step, noise[name]) if step or "eval" in name else None for step in steps] for name in names}
    superseded = {name: [curve(name, step, random.Random(step)) for step in (61, 62, 63)] for name in names}
    return {"step": steps, "series": series, "superseded": {"step": [61, 62, 63], "series": superseded}}


def marks(run_id, extra=()):
    return {"marks": [
        {"step": 63, "at_s": NOW_S - 700, "kind": "recovery", "process": "ROLLOUT[1]", "cause": "process_died",
         "message": "killed by signal 9", "cost_s": 31.2},
        {"step": 91, "at_s": NOW_S - 300, "kind": "restart", "process": "", "cause": "node_lost",
         "message": f"node-1 is gone {EVIL}", "cost_s": 64.0},
        {"step": 40, "at_s": NOW_S - 900, "kind": "resize", "process": "", "cause": "", "message": "ROLLOUT 2 to 4", "cost_s": 6.1},
        *extra,
    ]}  # fmt: skip


def step(run_id, number):
    noise = random.Random(number)
    begin = 0.0
    parts = [("generation", 4.1), ("reward", 0.9), ("sync", 0.6), ("update", 2.2), ("commit", 0.3), ("trainer", 0.2)]
    lanes = {"trainer": [("wait", "waits for ROLLOUT.generate", 4.1), ("wait", "waits for REWARD.score", 0.9),
                         ("wait", "waits for ACTOR.update", 2.8), ("call", "trainer", 0.5)]}  # fmt: skip
    for rank in range(4):
        own = 3.9 if rank == 2 else 2.1 + noise.random() * 0.3
        lanes[f"rollout-{rank}"] = [("call", "generate", own), ("wait", "waits for ROLLOUT.generate" if rank != 2 else "waits for the trainer", 8.3 - own)]
    for rank in range(2):
        lanes[f"actor-{rank}"] = [("wait", "waits for ROLLOUT.generate", 5.0), ("call", "update", 2.2), ("call", "send_weights", 0.6), ("wait", "waits for the trainer", 0.5)]
        lanes[f"reward-{rank}"] = [("wait", "waits for ROLLOUT.generate", 4.1), ("call", "score", 0.9), ("wait", "waits for the trainer", 3.3)]
    shown = []
    for process, spans in lanes.items():
        at, lane = begin, []
        for kind, label, seconds in spans:
            cause = "ROLLOUT[2]" if kind == "wait" and "ROLLOUT" in label else ""
            phases = {"prefill": seconds * 0.2, "decode": seconds * 0.8} if label == "generate" else {}
            lane.append({"begin_s": at, "end_s": at + seconds, "kind": kind, "label": label, "cause": cause, "phases": phases})
            at += seconds
        shown.append({"process": process, "spans": lane})
    slow = {"kind": "slow_rank", "process": "ROLLOUT[2]", "method": "generate", "cost_s": 1.72,
            "sentence": "ROLLOUT[2] took 3.9 s for generate; its peers took 2.2 s.",
            "remedy": "Look at node-0 (device 3): is another process on it?"}  # fmt: skip
    values = curves(run_id, METRICS)
    return {
        "step": number, "began_s": NOW_S - 8.4 * (121 - number), "total_s": sum(seconds for _, seconds in parts),
        "parts": [{"name": name, "seconds": seconds} for name, seconds in parts], "lanes": shown,
        "metrics": {name: values["series"][name][min(number, len(values["step"]) - 1)] for name in METRICS},
        "findings": [slow] if number % 2 == 0 else [],
    }  # fmt: skip


def samples(run_id, number, query):
    noise = random.Random(number)
    rows = []
    for at in range(64):
        prompt, index = divmod(at, 8)
        reward = None if at == 9 else float(noise.random() < 0.5)
        text = f"I add the tens first: 4{prompt} + 1{index} …\nSo the answer is {50 + prompt + index}."
        if prompt == 2:
            text = f'<think>I should compute it.</think><tool_call>{{"name": "calculator", "arguments": {{"x": "4{index}+2"}}}}</tool_call><|im_end|>\n<|im_start|>tool\n<tool_response>4{index + 2}</tool_response><|im_end|>\n<|im_start|>assistant\nThe answer is 4{index + 2}.<|im_end|>'
        sample = {
            "step": number, "prompt_id": prompt, "sample_index": index, "retry": 0, "trajectory": at, "reward": reward,
            "version": number - 1, "min_version": number - 1, "staleness": 0, "reward/format": 1.0, "advantage": None if reward is None else reward - 0.5,
            "mark": "failed" if at == 9 else "filtered" if prompt == 5 else "", "reason": "all rewards are equal" if prompt == 5 else "",
            "error": f"the verifier raised ValueError: {EVIL}" if at == 9 else None, "prompt_tokens": 24, "completion_tokens": 20 + noise.randrange(60),
            "turns": 3 if prompt == 2 else 1, "rank": at % 2, "update": 0, "micro_batch": at // 16,
            "prompt": f"What is 4{prompt} + 1{prompt}? {EVIL if prompt == 3 else ''}", "completion": text + (EVIL if prompt == 3 else ""), "answer": str(50 + prompt),
        }  # fmt: skip
        if at < 4:
            tokens = [part for word in text.split(" ") for part in (f" {word}",)]
            sample |= {"tokens": tokens, "token_logprobs": [-noise.expovariate(2) for _ in tokens], "token_old_logprobs": [-noise.expovariate(2) for _ in tokens],
                       "token_advantages": [noise.gauss(0.2, 0.4) for _ in tokens]}  # fmt: skip
        rows.append(sample)
    rows = [each for each in rows if query.get("q", "").lower() in json.dumps(each).lower()]
    rows = [each for each in rows if not query.get("errors") or each["error"]]
    rows = [each for each in rows if query.get("prompt", "") in ("", str(each["prompt_id"]))]
    key = {"reward": "reward", "length": "completion_tokens", "error": "error", "prompt": "prompt_id"}[query.get("sort", "reward")]
    rows.sort(key=lambda each: (each[key] is None, each[key] or 0), reverse=query.get("order") == "desc")
    offset, limit = int(query.get("offset", 0)), int(query.get("limit", 50))
    return {"step": number, "first": 1, "last": RUNS[run_id][3], "total": len(rows), "rows": rows[offset : offset + limit], "functions": ["format"]}


def evaluations(query):
    prompts = [{"prompt_id": at, "prompt": f"What is {at} + {at * 3}?"} for at in range(12)]
    prompt = query.get("prompt")
    answers = [] if prompt is None else [
        {"step": at, "rows": [{"prompt_id": int(prompt), "prompt": f"What is {prompt}?", "completion": f"After {at} steps I say {at // 20}. {EVIL}",
                               "reward": float(at > 60), "answer": "7"}]} for at in range(0, 121, 20)]  # fmt: skip
    return {"steps": list(range(0, 121, 20)), "prompts": prompts, "answers": answers}


def events(query, more):
    processes = ["master", "trainer", "rollout-0", "rollout-1"]
    whole = [{"at_s": NOW_S - 400 + at, "process": processes[at % 4], "kind": "event" if at % 25 == 0 else "log",
              "level": ["INFO", "INFO", "WARNING", "INFO", "ERROR"][at % 5], "text": f"line {at} of the run {EVIL if at == 31 else ''}"} for at in range(300 + more)]  # fmt: skip
    after = int(query.get("after") or 0)
    new = [each for each in whole[after:] if query.get("q", "").lower() in each["text"].lower()]
    return {"events": [each for each in new if query.get("process") in (None, each["process"])], "next": str(len(whole)), "processes": processes}


class Mock:
    """The answers; ``advance`` is a further step with a recovery, as after a SIGKILL."""

    def __init__(self):
        self.bonus, self.extra = 0, []
        self.changed = threading.Condition()

    def advance(self):
        with self.changed:
            self.bonus += 1
            self.extra.append({"step": 120 + self.bonus, "at_s": NOW_S, "kind": "recovery", "process": "ACTOR[0]",
                               "cause": "process_died", "message": "killed while watching", "cost_s": None})  # fmt: skip
            self.changed.notify_all()

    def answer(self, path, query):
        run_id = query.get("id", LIVE)
        if run_id not in RUNS:
            return {"error": f"there is no run '{run_id}'"}
        bonus, extra = (self.bonus, self.extra) if run_id == LIVE else (0, ())
        groups = {}
        for name in METRICS:
            groups.setdefault(name.split("/")[0] if "/" in name else "update", []).append(name)
        table = {
            "api/runs": lambda: {"runs": [row(each) for each in RUNS], "now_s": NOW_S},
            "api/run": lambda: run(run_id, bonus),
            "api/metrics": lambda: {"names": METRICS, "groups": groups},
            "api/curves": lambda: curves(run_id, query.get("names", ",".join(METRICS)).split(","), bonus),
            "api/marks": lambda: marks(run_id, extra),
            "api/step": lambda: step(run_id, int(query["step"])),
            "api/samples": lambda: samples(run_id, int(query["step"]), query),
            "api/evaluations": lambda: evaluations(query),
            "api/events": lambda: events(query, 5 * bonus),
            "api/diff": lambda: {"settings": [{"key": "algorithm.name", "values": [RUNS[each][0] for each in query["ids"].split(",")]}]},
        }
        return table[path]()

    def exported(self):
        """The page as one file, for one run, with the last two steps."""
        page = (STATIC / "index.html").read_text()
        for name in ("uPlot.iife.min.js", "page.js", "runs.js", "curves.js", "steps.js", "samples.js"):
            page = page.replace(f'<script src="static/{name}"></script>', f"<script>{(STATIC / name).read_text()}</script>")
        for name in ("uPlot.min.css", "page.css"):
            page = page.replace(f'<link rel="stylesheet" href="static/{name}">', f"<style>{(STATIC / name).read_text()}</style>")
        answers = {"api/runs": {"runs": [row(LIVE)], "now_s": NOW_S}}
        for path in ("run", "metrics", "curves", "marks", "evaluations", "events"):
            answers[f"api/{path}?id={LIVE}"] = self.answer(f"api/{path}", {"id": LIVE})
        answers[f"api/evaluations?id={LIVE}&prompt=0"] = self.answer("api/evaluations", {"id": LIVE, "prompt": "0"})
        for number in (119, 120):
            answers[f"api/step?id={LIVE}&step={number}"] = step(LIVE, number)
            answers[f"api/samples?id={LIVE}&step={number}"] = samples(LIVE, number, {"limit": 1000})
        data = json.dumps(answers).replace("<", "\\u003c")
        return page.replace('<script src', '<script src', 1).replace("<noscript>", f'<script type="application/json" id="answers">{data}</script>\n<noscript>')


def serve(mock, port=0):
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def do_GET(self):
            target = urlsplit(self.path)
            path, query = target.path.lstrip("/"), {name: values[0] for name, values in parse_qs(target.query).items()}
            if path == "api/stream":
                return self.stream()
            if path.startswith("api/"):
                answer = mock.answer(path, query)
                return self.send(404 if "error" in answer else 200, "application/json", json.dumps(answer).encode())
            file = STATIC / (path.removeprefix("static/") or "index.html")
            if not file.is_file():
                return self.send(404, "text/plain", b"none")
            return self.send(200, TYPES[file.suffix], file.read_bytes())

        def send(self, status, kind, body):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", POLICY)
            self.end_headers()
            self.wfile.write(body)

        def stream(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                while True:
                    with mock.changed:
                        changed = mock.changed.wait(1)
                    self.wfile.write(b"event: change\ndata: {}\n\n" if changed else b"event: ping\ndata: {}\n\n")
                    self.wfile.flush()
            except OSError:
                return

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


if __name__ == "__main__":
    address = serve(Mock(), 8765).server_address
    print(f"http://127.0.0.1:{address[1]}/")  # noqa: T201
    while True:
        time.sleep(3600)
