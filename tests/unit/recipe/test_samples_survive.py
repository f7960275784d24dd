# SPDX-License-Identifier: Apache-2.0
"""A run's samples go from the rollouts into its folder, past the trainer, and are there once whichever process dies."""

import json
import os
from collections import Counter
from dataclasses import replace

import pytest

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.reporting.sample_file import WriteRequest
from dlrover.python.rl.recipe.workloads import ActorWorkload, RewardWorkload, RolloutWorkload
from dlrover.python.rl.runtime.checkpoint import member_state
from dlrover.python.rl.trainer.call_log import CallProbe
from dlrover.python.rl.trainer.workload import trainer_invocation
from tests.chaos.job import tiny_job
from tests.support.durable_toys import TrainerKilled, both, kill, kill_trainer
from tests.support.recipe_stage import Stage
from tests.support.run_files import write_rows

STEPS = 3
FILES = ("samples.jsonl", "held_out.jsonl")
BESIDE = {"published_stamp", "receive_weights", "init_model", "init_verifier", "machine", "device_share"}
"""Methods that return other texts: a name, or a fingerprint."""


class TornRollout(RolloutWorkload):
    """Once it writes a part of the lines, and ``then`` something happens."""

    then = None

    @trainer_invocation(target="RANK0")
    def write_samples(self, packed, rollouts):
        then, request = type(self).then, WriteRequest.unpack(packed)
        if then is None or request.step < 2:
            return super().write_samples(packed, rollouts)
        type(self).then = None
        torn = request._replace(rows=request.rows[:5], numbers=request.numbers.rows(0, 5))
        super().write_samples(torn.pack(), rollouts)
        os.truncate(request.file, request.file.stat().st_size - 10)
        return then()


@pytest.fixture(autouse=True)
def _tears_nothing_more():
    yield
    TornRollout.then = None


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tmp_path_factory.mktemp("inputs")


def stage(folder, inputs, steps=STEPS, **config):
    roles = {"ACTOR": (ActorWorkload, 1), "ROLLOUT": (TornRollout, 2), "REWARD": (RewardWorkload, 1)}
    rollout = {"samples_per_prompt": 4, "max_new_tokens": 3, **config.pop("rollout", {})}
    job = tiny_job(inputs, steps, prompts_per_step=4, rollout=rollout, **config)
    return Stage(folder / "out", GRPOTrainer, roles, job.config)


def files_of(job, faults=None):
    job.run(faults)
    return {name: (job.folder / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, inputs):
    job = stage(tmp_path_factory.mktemp("undisturbed"), inputs)
    return files_of(job), list(job.port.calls)


def calls_to(calls, method):
    return [at for at, call in enumerate(calls) if call[2] == method]


def strike(job, method, when, faults):
    """At the first calls of a method these things happen, one at each."""
    submit = job.port.submit

    def striking(role, rank, call):
        fault = faults.pop(0) if call.method == method and rank == 0 and faults else nothing
        (fault if when == "before" else nothing)(job.port)
        ref = submit(role, rank, call)
        (fault if when == "after" else nothing)(job.port)
        return ref

    job.port.submit = striking


def nothing(port):
    pass


RARE = [pytest.param(method, marks=pytest.mark.slow) for method in ("texts", "cut_samples", "write_held_out")]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", ["write_samples", *RARE])
def test_deaths_while_files_are_written_leave_the_same_files(tmp_path, inputs, undisturbed, method, when):
    rollout = kill("ROLLOUT", 0)
    faults = [both(rollout, kill_trainer), kill_trainer, rollout]
    if method == "cut_samples" or (method, when) == ("write_held_out", "after"):
        faults.pop()  # it has two calls; or once the last call's worker has died, nothing asks for it again
    job = stage(tmp_path, inputs)
    strike(job, method, when, faults)
    assert files_of(job) == undisturbed[0]
    assert not faults


@pytest.mark.parametrize("process", ["trainer", "member"])
def test_death_amid_a_steps_lines_leaves_them_once(tmp_path, inputs, undisturbed, process):
    job = stage(tmp_path, inputs)

    def die():
        assert not (job.folder / "samples.jsonl").read_bytes().endswith(b"\n")
        if process == "trainer":
            raise TrainerKilled
        job.port.kill("ROLLOUT", 0)

    TornRollout.then = die
    assert files_of(job) == undisturbed[0]
    assert TornRollout.then is None


@pytest.mark.parametrize("change", ["rows", "nothing", "half"])
def test_resumed_run_adds_to_a_file_changed_from_outside(tmp_path, inputs, undisturbed, change, monkeypatch):
    """The end of the last step's lines is looked for then."""
    expected, calls = undisturbed
    lines = expected["samples.jsonl"].splitlines(keepends=True)
    job = stage(tmp_path, inputs)
    monkeypatch.setattr(member_state, "AT_ONCE_BYTES", 1 << 30)  # else step 1 may not be committed when step 2 begins
    left = {"rows": b'{"step": 1, "own": 1}\n', "nothing": b"", "half": b"".join(lines[:16]) + lines[16][:20]}[change]

    def change_file(port):
        (job.folder / "samples.jsonl").write_bytes(left)
        port.kill("ROLLOUT", 0)
        raise TrainerKilled

    files = files_of(job, {(calls_to(calls, "write_samples")[1], "before"): change_file})
    assert files["samples.jsonl"] == left[: left.rfind(b"\n") + 1] + b"".join(lines[16:])


def texts_in(value):
    """The number of characters of all texts in a result."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Batch):
        return sum(map(texts_in, value.columns.values()))
    if isinstance(value, dict):
        return texts_in(list(value.values()))
    return sum(map(texts_in, value)) if isinstance(value, list | tuple) else 0


class Counted(GRPOTrainer):
    """Counts the characters that it receives, by the method that has returned them."""

    received = Counter()

    def bind(self, link, attempt=None):
        steps = super().bind(link, attempt)
        wait = steps.port.wait

        def counting(refs, timeout_s):
            outcomes = wait(refs, timeout_s)
            for ref, outcome in zip(refs, outcomes, strict=True):
                if not isinstance(ref.token, CallProbe):  # which has the number of rows only
                    self.received[ref.method] += texts_in(outcome.value)
            return outcomes

        steps.port.wait = counting
        return steps


@pytest.mark.parametrize("shown", [0, 2])
def test_trainer_receives_no_more_text_of_longer_samples(tmp_path, inputs, shown):
    counts, sizes = [], []
    for zeros, tokens in ((0, 2), (12, 12)):
        rows = [{"prompt": f"{'0' * zeros}{number}+1=", "answer": str(number + 1)} for number in range(1, 30)]
        data = {"train": write_rows(tmp_path / f"{tokens}.jsonl", rows), "eval_rows": 4}
        log, rollout = {"samples_every": 0, "show_samples": shown, "max_chars": 3}, {"max_new_tokens": tokens}
        job = stage(tmp_path / str(tokens), inputs, steps=2, data=data, rollout=rollout, log=log, eval_every=1)
        job.trainer, Counted.received = Counted, Counter()
        job.run()
        counts.append(Counted.received)
        sizes.append(sum((job.folder / name).stat().st_size for name in FILES))
    assert sizes[1] > sizes[0] + 1000
    assert counts[0]["init_model"] == counts[1]["init_model"] > 0, "names of engines"
    methods = {name for received in counts for name, count in received.items() if count}
    assert methods - {"write_samples"} <= BESIDE
    assert (counts[0]["write_samples"] > 0) == bool(shown)
    assert max(received["write_samples"] for received in counts) <= 2 * shown * 300


@pytest.mark.parametrize("is_local", [False, True], ids=["rollout", "trainer"])
def test_log_samples_keeps_the_first_samples_of_each_step(tmp_path, inputs, undisturbed, is_local):
    job = stage(tmp_path, inputs, log={"samples": 5, "samples_rows": 7})
    if is_local:  # the files of the run are in an object store
        upath, link = pytest.importorskip("upath"), job.link
        job.link = lambda **options: replace(link(**options), results=upath.UPath("memory://runs/few"))
    files = files_of(job, {(calls_to(undisturbed[1], "publish_weights")[2], "after"): kill_trainer})
    rows = [json.loads(line) for line in undisturbed[0]["samples.jsonl"].splitlines()]
    expected = [row for row in rows if row["trajectory"] < 5]
    assert [json.loads(line) for line in files["samples.jsonl"].splitlines()] == expected
    assert len(expected) == STEPS * 5
    assert bool(calls_to(job.port.calls, "write_samples")) != is_local
    assert files["held_out.jsonl"] == undisturbed[0]["held_out.jsonl"]
