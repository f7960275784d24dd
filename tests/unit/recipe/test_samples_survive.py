# SPDX-License-Identifier: Apache-2.0
"""The samples of a run go from the rollouts into its folder: none of their texts passes through the trainer, and the
file is that of an undisturbed run, whichever process dies while it is written."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.online.batch import StepBatch
from dlrover.python.rl.recipe.reporting.sample_file import format_rows, write_step
from dlrover.python.rl.recipe.workloads import ActorWorkload, RewardWorkload, RolloutWorkload
from dlrover.python.rl.runtime.checkpoint import member_state
from dlrover.python.rl.trainer.call_log import CallProbe
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.workload import trainer_invocation
from tests.chaos.job import tiny_job
from tests.support.recipe_stage import Stage, TrainerKilled, both, kill, kill_trainer

STEPS = 3
FILES = ("samples.jsonl", "held_out.jsonl")
BESIDE = {"published_stamp", "receive_weights", "init_model", "init_verifier", "machine", "device_share"}
"""Methods that give a trainer a text of their own: a name, or a fingerprint."""
HERE = []


class Judge(RewardWorkload):
    def init_verifier(self, reward, columns):
        HERE.append(self)
        super().init_verifier(reward, columns)


class TornRollout(RolloutWorkload):
    """Once it writes a part of the lines, and ``then`` something happens."""

    then = None

    @trainer_invocation(target="RANK0")
    def write_samples(self, file, step, at, numbers, texts, excerpt):
        then = type(self).then
        if then is None or step < 2:
            return super().write_samples(file, step, at, numbers, texts, excerpt)
        type(self).then = None
        write_step(file, step, list(format_rows(numbers, texts))[:5], excerpt, at)
        os.truncate(file, file.stat().st_size - 10)
        return then()


class SuicidalRollout(TornRollout):
    """The whole process dies, of a job in one process; once in a folder."""

    @trainer_invocation(target="RANK0")
    def write_samples(self, file, step, at, numbers, texts, excerpt):
        mark = file.parent / "died"
        type(self).then = None if mark.exists() else lambda: (mark.touch(), os.kill(os.getpid(), signal.SIGKILL))
        return super().write_samples(file, step, at, numbers, texts, excerpt)


@pytest.fixture(autouse=True)
def _no_verifier_is_left():
    yield
    TornRollout.then = None
    while HERE:
        HERE.pop().close()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tmp_path_factory.mktemp("inputs")


def stage(folder, inputs, steps=STEPS, **config):
    roles = {"ACTOR": (ActorWorkload, 1), "ROLLOUT": (TornRollout, 2), "REWARD": (Judge, 1)}
    rollout = {"samples_per_prompt": 4, "max_new_tokens": 3, "temperature": 1.0, **config.pop("rollout", {})}
    job = tiny_job(inputs, steps, prompts_per_step=4, rollout=rollout, **config)
    return Stage(folder / "out", GRPOTrainer, roles, job.config)


def files_of(made, faults=None):
    made.run(faults)
    return {name: (made.folder / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, inputs):
    made = stage(tmp_path_factory.mktemp("undisturbed"), inputs)
    return files_of(made), list(made.port.calls)


def calls_to(calls, method):
    return [at for at, call in enumerate(calls) if call[2] == method]


def strike(made, method, when, faults):
    """At the first calls of a method these things happen, one at each."""
    submit = made.port.submit

    def striking(role, rank, call):
        fault = faults.pop(0) if call.method == method and rank == 0 and faults else nothing
        (fault if when == "before" else nothing)(made.port)
        ref = submit(role, rank, call)
        (fault if when == "after" else nothing)(made.port)
        return ref

    made.port.submit = striking


def nothing(port):
    pass


@pytest.mark.parametrize(("method", "first"), [("begin_samples", 2), ("write_samples", 3)])
def test_a_file_that_is_removed_while_the_run_goes_on_is_begun_again(tmp_path, inputs, undisturbed, method, first):
    made = stage(tmp_path, inputs)
    strike(made, method, "after", [nothing, lambda port: (made.folder / "samples.jsonl").unlink()])
    expected = undisturbed[0]["samples.jsonl"].splitlines()
    assert files_of(made)["samples.jsonl"].splitlines() == [
        line for line in expected if json.loads(line)["step"] >= first
    ]


@pytest.mark.parametrize(
    ("method", "when"),
    [
        ("begin_samples", "before"),
        ("write_samples", "after"),
        *(
            pytest.param(method, when, marks=pytest.mark.slow)
            for method, when in (("begin_samples", "after"), ("write_samples", "before"))
        ),
        *(
            pytest.param(method, when, marks=pytest.mark.slow)
            for method in ("texts", "write_held_out")
            for when in ("before", "after")
        ),
    ],
)
def test_the_file_of_a_run_is_the_same_whoever_dies_at_a_call_that_writes_it(
    tmp_path, inputs, undisturbed, method, when
):
    rollout = kill("ROLLOUT", 0)
    faults = [kill_trainer, rollout, both(rollout, kill_trainer)]
    if (method, when) == ("write_held_out", "after"):
        faults.pop()  # the last call: once its worker has died, nothing asks for it again
    made = stage(tmp_path, inputs)
    strike(made, method, when, faults)
    assert files_of(made) == undisturbed[0]
    assert not faults


def test_a_part_of_a_steps_lines_is_replaced_whoever_died_while_it_was_written(tmp_path, inputs, undisturbed):
    for name in ("trainer", "member"):
        made = stage(tmp_path / name, inputs)

        def die(made=made, name=name):
            assert not (made.folder / "samples.jsonl").read_bytes().endswith(b"\n")
            if name == "trainer":
                raise TrainerKilled
            made.port.kill("ROLLOUT", 0)

        TornRollout.then = die
        assert files_of(made) == undisturbed[0], name
        assert TornRollout.then is None


@pytest.mark.parametrize("change", ["rows", "nothing", "half"])
def test_a_run_that_goes_on_with_a_file_that_was_changed_meanwhile_writes_the_rest(
    tmp_path, inputs, undisturbed, change, monkeypatch
):
    """Where the lines of the last step end is looked for then."""
    expected, calls = undisturbed
    lines = expected["samples.jsonl"].splitlines(keepends=True)
    made = stage(tmp_path, inputs)
    monkeypatch.setattr(member_state, "AT_ONCE_BYTES", 1 << 30)  # else step 1 may not be committed when step 2 begins
    left = {"rows": b'{"step": 1, "own": 1}\n', "nothing": b"", "half": b"".join(lines[:16]) + lines[16][:20]}[change]

    def change_file(port):
        (made.folder / "samples.jsonl").write_bytes(left)
        port.kill("ROLLOUT", 0)
        raise TrainerKilled

    begins = calls_to(calls, "begin_samples")
    found = files_of(made, {(begins[1], "before"): change_file})
    whole = left[: left.rfind(b"\n") + 1]
    assert found["samples.jsonl"] == whole + b"".join(lines[16:])


def texts_in(value):
    """The characters of all texts in a result."""
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
def test_the_trainer_receives_no_more_text_of_longer_samples(tmp_path, inputs, shown):
    counts, sizes = [], []
    for zeros, tokens in ((0, 2), (12, 12)):
        file = tmp_path / f"{tokens}.jsonl"
        rows = [{"prompt": f"{'0' * zeros}{number}+1=", "answer": str(number + 1)} for number in range(1, 30)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        made = stage(
            tmp_path / str(tokens),
            inputs,
            steps=2,
            data={"train": str(file), "eval_rows": 4},
            rollout={"max_new_tokens": tokens},
            log={"samples_every": 0, "show_samples": shown, "max_chars": 3},
            eval_every=1,
        )
        made.trainer, Counted.received = Counted, Counter()
        made.run()
        counts.append(Counted.received)
        sizes.append(sum((made.folder / name).stat().st_size for name in FILES))
    assert sizes[1] > sizes[0] + 1000
    assert counts[0]["init_model"] == counts[1]["init_model"] > 0, "names of engines"
    steps = [{name: count for name, count in received.items() if count} for received in counts]
    assert {name for received in steps for name in received} - {"write_samples"} <= BESIDE
    assert (counts[0]["write_samples"] > 0) == bool(shown)
    assert counts[0]["write_samples"] <= 2 * shown * 300
    assert counts[1]["write_samples"] <= 2 * shown * 300


def test_a_run_whose_files_are_in_an_object_store_has_the_same_samples(tmp_path, inputs, undisturbed):
    upath = pytest.importorskip("upath")
    made = stage(tmp_path, inputs)
    link = made._link
    made._link = lambda: replace(link(), results=upath.UPath("memory://runs/samples"))
    assert files_of(made, {(calls_to(undisturbed[1], "publish_weights")[2], "after"): kill_trainer}) == undisturbed[0]
    assert not calls_to(made.port.calls, "write_samples")


@pytest.mark.parametrize("is_local", [False, True], ids=["rollout", "trainer"])
@pytest.mark.parametrize(("most", "kept"), [(5, 5), (100, 16), ("off", 0)])
def test_log_samples_keeps_the_first_samples_of_each_step(tmp_path, inputs, undisturbed, most, kept, is_local):
    made = stage(tmp_path, inputs, log={"samples": most, "samples_rows": 7})
    if is_local:
        upath, link = pytest.importorskip("upath"), made._link
        made._link = lambda: replace(link(), results=upath.UPath("memory://runs/few"))
    faults = {(calls_to(undisturbed[1], "publish_weights")[2], "after"): kill_trainer}
    files = files_of(made, faults)
    rows = [json.loads(line) for line in undisturbed[0]["samples.jsonl"].splitlines()]
    expected = [row for row in rows if row["trajectory"] < kept]
    assert [json.loads(line) for line in files["samples.jsonl"].splitlines()] == expected
    assert len(expected) == STEPS * kept
    assert files["held_out.jsonl"] == undisturbed[0]["held_out.jsonl"]


def test_rows_that_are_filtered_out_are_written_with_their_own_texts():
    def part(ids, rewards):
        columns = {"prompt_id": np.array(ids), "reward": np.array(rewards), "sample_index": np.arange(len(ids))}
        counted = {"action_tokens": np.ones(len(ids), dtype=np.int64), "trajectory": np.arange(len(ids))}
        batch = StepBatch.from_rollouts(Pending([]), Batch(columns | counted), np.arange(len(ids))[::-1], 2)
        return batch.drop_uniform_groups(batch.scored.dense("reward"))

    first, second = part([5, 5, 6, 6], [1.0, 0.0, 1.0, 1.0]), part([7, 7, 8, 8], [0.0, 0.0, 0.0, 1.0])
    step = StepBatch.concat([first, second])
    of_all_rollouts, expected = np.array([5, 5, 6, 6, 7, 7, 8, 8]), [5, 5, 8, 8, 6, 6, 7, 7]
    assert step.all_rows.dense("prompt_id").tolist() == expected
    assert of_all_rollouts[list(step.all_numbers)].tolist() == expected


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_samples_goes_on_with_the_same_file(tmp_path):
    out = {}
    for name, rollout in (("calm", "RolloutWorkload"), ("killed", "SuicidalRollout")):
        job = tiny_job(tmp_path / name, STEPS, log={"samples_every": 0})
        plain = OmegaConf.create(job_to_yaml(job))
        if name == "killed":
            plain.workload.rollout |= {"module": "test_samples_survive", "class": rollout}
        file = tmp_path / name / "job.yaml"
        OmegaConf.save(plain, file)
        paths = [str(Path(__file__).parent), *sys.path]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        cli, out[name] = [sys.executable, "-m", "dlrover.python.rl.cli"], tmp_path / name / "out"
        code = subprocess.run([*cli, "run", str(file), "--local"], env=env, cwd=tmp_path / name).returncode
        assert code == (0 if name == "calm" else -signal.SIGKILL)
        if name == "killed":
            subprocess.run([*cli, "resume", str(out[name])], env=env, cwd=tmp_path / name, check=True)
    for file in FILES:
        assert (out["calm"] / file).read_bytes() == (out["killed"] / file).read_bytes(), file
