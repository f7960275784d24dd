# SPDX-License-Identifier: Apache-2.0
"""Training by other libraries over role groups learns, survives the death of its processes, and computes what the
library computes: TRL's script with its import line changed, verl's PPO and OpenRLHF's."""

import io
import itertools
import json
import os
import signal
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrover.python.rl.algorithm.losses.columns import group_advantages
from dlrover.python.rl.data.state_tree import dump
from dlrover.python.rl.runtime.checkpoint.state_file import read_state
from tests.support.commands import ROOT, processes_below, wait_for

STEPS = 60

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Run:
    """A run of a library's example in ``folder``, in the library's environment."""

    library = reward = ""

    def __init__(self, folder, seed=0):
        self.folder, self.seed, self.log = folder, seed, folder / "output.log"

    def python(self, *arguments):
        path = os.pathsep.join(map(str, [ROOT, ROOT / "examples" / self.library, Path(__file__).parent]))
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        program = ROOT / f".venv-{self.library}/bin/python"
        with self.log.open("a") as log:
            return subprocess.Popen([str(program), *arguments], cwd=self.folder, env=env, stdout=log, stderr=log)

    def call(self, *arguments, within_s=200):
        assert self.python(*arguments).wait(timeout=within_s) == 0, self.log.read_text()[-4000:]

    @property
    def out(self):
        return self.folder / "out"

    def prepare(self):
        """Write what the job needs beside its file: a tiny model."""
        (self.folder / "examples").symlink_to(ROOT / "examples")
        model = f"runs/{self.library}-model"
        self.call("-m", "dlrover.python.rl.recipe.tiny", "--out", model, "--seed", str(self.seed))

    def start(self, *overrides):
        command = ["-m", "dlrover.python.rl.master.main", "run", f"examples/{self.library}/job.yaml", "job_dir=out"]
        return self.python(*command, *self.seeds(), *overrides)

    def seeds(self):
        return [f"train.seed={self.seed}"]

    def end(self, process):
        """Return the metrics of each step."""
        assert process.wait(timeout=700) == 0, self.log.read_text()[-4000:]
        return self.metrics()

    def metrics(self):
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    def has_done(self, steps):
        metrics = self.out / "metrics.jsonl"
        return metrics.exists() and len(metrics.read_text().splitlines()) >= steps

    def whole(self):
        self.prepare()
        return self.end(self.start())


class OpenRLHF(Run):
    library, reward, victims = "openrlhf", "reward", ("Critic", "Actor")

    def weights(self):
        names = {role: f"runs/openrlhf-trained{role}/model.safetensors" for role in ("", "_critic")}
        return {role: (self.folder / name).read_bytes() for role, name in names.items()}


class Verl(Run):
    library, reward, victims = "verl", "critic/score/mean", ("Critic", "Actor")

    def seeds(self):
        return [f"data.seed={self.seed}", f"actor_rollout_ref.rollout.seed={self.seed}"]

    def metrics(self):
        steps = super().metrics()
        return [{name: step[name] for name in step if "perf/" not in name and "mfu" not in name} for step in steps]

    def weights(self):
        """Return the contents of verl's checkpoints in the last commit; their archives hold times."""
        last, contents = max((self.folder / "out/checkpoints").glob("*/step-*")), {}
        for path in last.glob("*-0.*.state"):
            with tarfile.open(fileobj=io.BytesIO(read_state(path)["tar"])) as archive:
                (name,) = [name for name in archive.getnames() if name.endswith("rank-0.pt")]
                state = dump(torch.load(archive.extractfile(name), weights_only=False))
            contents[path.name.split(".")[0]] = state.skeleton, b"".join(bytes(buffer) for buffer in state.buffers)
        return contents


class Trl(Run):
    library, reward, victims = "trl", "reward/mean", ("ActorWorkload",)

    @property
    def out(self):
        return self.folder / f"build/trl/run-{self.seed}"

    def prepare(self):
        pass

    def start(self):
        return self.python(str(ROOT / "examples/trl/train.py"), str(self.seed))

    def metrics(self):
        return [{self.reward: step[self.reward]} for step in super().metrics()[1:]]

    def weights(self):
        return {path.name: path.read_bytes() for path in (self.out / "model").glob("*.safetensors")}


def needs(library):
    environment = ROOT / f".venv-{library}/bin/python"
    return pytest.mark.skipif(not environment.exists(), reason=f"make example NAME={library} makes its environment")


IGNORED = {
    "algorithm.filter_groups.enable": True,
    "algorithm.rollout_correction.rollout_is": "token",
    "actor_rollout_ref.rollout.multi_turn.enable": True,
    "actor_rollout_ref.model.lora_rank": 8,
    "actor_rollout_ref.model.lora.rank": 8,
    "actor_rollout_ref.actor.strategy": "fsdp",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": 2,
    "critic.megatron.virtual_pipeline_model_parallel_size": 2,
    "critic.strategy": "fsdp",
    "reward.reward_model.enable": True,
    "reward_model.enable": True,
    "data.val_batch_size": 8,
    "trainer.test_freq": 5,
    "trainer.no_such_key": 1,
}
"""Options of verl that its example has no counterpart of, with a value that is not verl's default."""

COMPLETE = """
import json, sys
from omegaconf import OmegaConf
from options import complete

answers = {}
for name, value in json.loads(sys.argv[1]).items():
    config = OmegaConf.load("examples/verl/job.yaml").config
    OmegaConf.update(config, name, value)
    try:
        whole = OmegaConf.create(complete(config, "CPU"))
        answers[name] = OmegaConf.select(whole, name), complete(whole, "CPU") == complete(config, "CPU")
    except Exception as error:
        answers[name] = str(error)
print(json.dumps(answers))
"""


@needs("verl")
def test_option_that_verls_example_would_ignore_is_refused(tmp_path):
    run = Verl(tmp_path)
    run.prepare()  # verl's check reads the model
    taken = {"algorithm.gamma": 0.9, "trainer.critic_warmup": 2, "actor_rollout_ref.actor.clip_ratio": 0.1}
    taken |= {"trainer.save_freq": 20}
    same = {"trainer.test_freq": -1, "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": 1}
    run.call("-c", COMPLETE, json.dumps(IGNORED))
    answers = json.loads(run.log.read_text().splitlines()[-1])
    assert answers == {name: f"without a counterpart here: {name}" for name in IGNORED}
    run.call("-c", COMPLETE, json.dumps(taken | same))
    answers = json.loads(run.log.read_text().splitlines()[-1])
    assert answers == {name: [value, True] for name, value in (taken | same).items()}


PARSE = (
    COMPLETE.replace("verl", "openrlhf")
    .replace("import complete", "import parse")
    .replace(
        """        whole = OmegaConf.create(complete(config, "CPU"))
        answers[name] = OmegaConf.select(whole, name), complete(whole, "CPU") == complete(config, "CPU")
""",
        "        answers[name] = OmegaConf.select(OmegaConf.create(parse(config)[0]), name)\n",
    )
)


@needs("openrlhf")
def test_option_that_openrlhfs_example_would_ignore_is_refused(tmp_path):
    run = OpenRLHF(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    ignored = {"train.partial_rollout_enable": True, "rollout.vllm_generate_batch_size": 64}
    ignored |= {"ds.lora.rank": 8, "algo.dynamic_filtering_enable": True, "train.async_enable": True}
    run.call("-c", PARSE, json.dumps({**ignored, "actor.eps_clip": 0.1}))
    answers = json.loads(run.log.read_text().splitlines()[-1])
    assert answers == {name: f"{name} has no counterpart here" for name in ignored} | {"actor.eps_clip": 0.1}


RUNS = [pytest.param(kind, marks=needs(kind.library), id=kind.library) for kind in (OpenRLHF, Verl, Trl)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A function that returns the undisturbed run of a library's example, and its metrics."""
    runs = {}

    def run(kind):
        if kind not in runs:
            one = kind(tmp_path_factory.mktemp("undisturbed"))
            runs[kind] = one, one.whole()
        return runs[kind]

    return run


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_rises(undisturbed, tmp_path, kind, seed):
    steps = kind(tmp_path, seed).whole() if seed else undisturbed(kind)[1]
    rewards = np.array([step[kind.reward] for step in steps])
    assert len(rewards) == STEPS
    first, last = rewards[:5], rewards[-5:]
    error = np.sqrt(first.var(ddof=1) / 5 + last.var(ddof=1) / 5)
    assert last.mean() - first.mean() > 3 * error, (first, last)


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("number", [0, 1])
def test_killed_process_changes_no_weight(undisturbed, tmp_path, kind, number):
    if number >= len(kind.victims):
        pytest.skip("it has one process that is trained")
    role, run = kind.victims[number], kind(tmp_path)
    run.prepare()
    process = run.start()
    wait_for(lambda: run.has_done(STEPS // 2) or process.poll() is not None, 400)
    assert process.poll() is None, run.log.read_text()[-3000:]
    (victim,) = [pid for pid, command in processes_below(process.pid).items() if command.startswith(f"ray::{role}")]
    os.kill(victim, signal.SIGKILL)
    expected, metrics = undisturbed(kind)
    assert run.end(process) == metrics
    assert f"{role.removesuffix('Workload').upper()}: replaced rank 0" in run.log.read_text()
    assert run.weights() == expected.weights() != {}


@needs("openrlhf")
def test_columns_losses_and_gradients_are_those_of_openrlhf(tmp_path):
    """Record the third step, with one update over all of its rows."""
    run = OpenRLHF(tmp_path)
    run.prepare()
    overrides = ["trainer.module=openrlhf_reference", "trainer.class=RecordingPPO", "train.num_episodes=2"]
    (*_, step, _) = run.end(run.start(*overrides, "train.batch_size=32", "train.micro_batch_size=32"))
    run.call(str(Path(__file__).with_name("openrlhf_reference.py")))
    differences = json.loads((tmp_path / "differences.json").read_text())
    metrics = differences.pop("metrics")
    assert len(differences) == 5 and max(differences.values()) < 1e-5, differences
    assert step["step"] == 3 and metrics["kl"] > 0.01
    assert len(metrics) == 6 and {name: step[name] for name in metrics} == pytest.approx(metrics, rel=1e-5, abs=1e-5)


@needs("verl")
def test_columns_losses_and_gradients_are_those_of_verl(tmp_path):
    """The critic begins with a head that both sides load."""
    head = (
        "from transformers import AutoModelForTokenClassification as Model; import torch; torch.manual_seed(0);"
        "Model.from_pretrained('runs/verl-model', num_labels=1).save_pretrained('critic');"
        "from transformers import AutoTokenizer as T; T.from_pretrained('runs/verl-model').save_pretrained('critic')"
    )
    overrides = ["config.trainer.total_training_steps=1", "config.trainer.rollout_data_dir=rows"]
    overrides += ["actor_rollout_ref.actor.ppo_mini_batch_size=32", "critic.ppo_mini_batch_size=32"]
    overrides += ["critic.model.path=critic"]
    run = Verl(tmp_path)
    run.prepare()
    run.call("-c", head)
    (step,) = run.end(run.start(*overrides))
    run.call(str(Path(__file__).with_name("verl_reference.py")), "out/job.yaml", "rows/1.pkl")
    reference_values = json.loads(run.log.read_text().splitlines()[-1])
    metrics = {name: reference_values.pop(name) for name in list(reference_values) if "/" in name}
    assert len(reference_values) == 6 and max(reference_values.values()) < 1e-5, reference_values
    assert len(metrics) == 4 and {name: step[name] for name in metrics} == pytest.approx(metrics, rel=1e-5, abs=1e-5)


@needs("trl")
def test_advantages_are_those_of_trl(undisturbed):
    """Compute advantages as ``GRPOTrainer`` does: by the unbiased deviation of a group, plus 1e-4."""
    lines = (undisturbed(Trl)[0].out / "samples.jsonl").read_text().splitlines()
    compared = 0
    for _, rows in itertools.groupby(map(json.loads, lines), key=lambda sample: (sample["step"], sample["prompt_id"])):
        rewards = torch.tensor([row["reward"] for row in rows])
        if len(rewards) == 8 and rewards.std() > 0:
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            advantages = group_advantages(np.zeros(8, dtype=np.int64), rewards.numpy(), "std_unbiased", None, 1e-4)
            assert advantages == pytest.approx(expected.numpy(), abs=1e-5)
            compared += 1
    assert compared


@needs("trl")
def test_fields_of_trl_become_keys_or_are_refused(tmp_path):
    code = """
import json, sys
from dlrover_trl import GRPOConfig, keys_of
common = dict(output_dir="x", use_cpu=True, bf16=False, per_device_train_batch_size=16)
loss = dict(loss_type="dr_grpo", scale_rewards=False, epsilon_high=0.3)
keys = keys_of(GRPOConfig(**common, **loss, steps_per_generation=2), 10)
cispo = dict(loss_type="cispo", epsilon_high=5.0, num_iterations=2, eval_strategy="steps", eval_steps=4)
keys["cispo"] = keys_of(GRPOConfig(**common, **cispo, steps_per_generation=2, num_train_epochs=1), 8)
try:
    keys_of(GRPOConfig(**common, top_entropy_quantile=0.5), 10)
except ValueError as error:
    keys["refused"] = str(error)
json.dump(keys, open("keys.json", "w"))
"""
    Trl(tmp_path).call("-c", code)
    keys = json.loads((tmp_path / "keys.json").read_text())
    cispo = keys["cispo"]
    of_loss = {"name": "dr_grpo", "averaging": "constant", "max_tokens": 512, "clip_high": 0.3}
    assert keys["algorithm"] | of_loss == keys["algorithm"]
    assert (keys["prompts_per_step"], keys["updates_per_step"], keys["steps"]) == (4, 2, 9)
    of_cispo = {"clip_low": 1.0, "clip_high": 4.0, "normalize": "std_unbiased"}
    assert cispo["algorithm"] | of_cispo == cispo["algorithm"]
    assert (cispo["steps"], cispo["eval_every"]) == (2, 1)
    assert "GRPOConfig's top_entropy_quantile" in keys["refused"]


@needs("openrlhf")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.adam.lrr=1", "unrecognized arguments: --actor.adam.lrr"),
        ("algo.advantage.estimator=gea", "invalid choice: 'gea'"),
        ("train.async_enable=true", "train.async_enable has no counterpart here"),
        ("algo.advantage.estimator=reinforce", "workload.critic: goes with algo.advantage.estimator=gae"),
        ("ds.zero_stage=3", "is for transformers 5.15"),
        ("reward.remote_url=http://127.0.0.1:1", "a file with a reward_func here"),
    ],
)
def test_options_unknown_to_openrlhf_or_the_example_are_refused(tmp_path, override, message):
    run = OpenRLHF(tmp_path)
    run.prepare()
    assert run.start(override).wait(timeout=100) != 0
    assert message in run.log.read_text()
