# SPDX-License-Identifier: Apache-2.0
"""A job file's ``config`` for the ready recipes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, SamplingParams
from dlrover.python.rl.engine.api.settings import ParallelSizes

Positive = Annotated[int, Gt(0)]
NonNegative = Annotated[int, Ge(0)]

_LOSSES = ("loss", "nll", "perplexity", "kl", "failed")


@dataclass(frozen=True)
class EngineConfig:
    """How engines run, the same for every role."""

    train: str = "fsdp2"
    """The train engine: ``fsdp2``, ``deepspeed``, ``megatron`` an entry point or ``module:Class``."""

    train_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of this train engine only: ``{zero_stage: 2}`` of deepspeed."""

    rollout: str = "torch"
    """The rollout engine: ``torch``, ``vllm``, ``sglang`` an entry point or ``module:Class``."""

    rollout_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of this rollout engine only."""

    weight_sync: str = "auto"
    """How weights get from the actor to the rollouts: ``pull`` (rollouts fetch them from the actor's memory or through
    TCP), ``disk``, ``broadcast`` (gloo, or nccl on cuda), ``cuda_ipc``, an entry point, or ``package.module:Class``.
    ``auto`` is ``pull``."""

    weight_sync_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the weight sync: ``folder``, ``bucket_bytes``, ``timeout_s``."""

    device: str = "cpu"
    """A torch device: ``cuda`` is that which each member was given; with a number, one for all."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the passes. Masters, optimizer and gradient reduction are float32 in either case."""

    parallel: ParallelSizes | None = None
    """How the actor's members divide the model; those that are left over shard its parameters. None: each holds a copy
    where the engine can, and comes back from its own file when it is lost."""

    lora: LoraSettings | None = None
    """Train adapters of the actor only, where the engine can; rollouts are given the merged weights."""

    max_tokens_per_microbatch: Positive = 16384
    """Most tokens of one forward pass of a train engine; a longer row comes alone."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    max_batch: Positive = 128
    """Most sequences that a rollout engine decodes at once."""

    rollout_tensor_parallel_size: Positive = 1
    """Devices over which each rollout member splits the model, where the engine can."""

    gpu_memory_utilization: Annotated[float, Gt(0.0), Le(1.0)] = 0.85
    """Share of a device that a rollout engine's weights and key-value cache may fill."""

    threads: Positive | None = None
    """CPU threads of each member; None leaves it to the environment (``OMP_NUM_THREADS``). Their number decides the
    order in which some sums are taken: give it for results that agree to the bit on machines of different sizes."""

    def with_receivers(self, count: int) -> "EngineConfig":
        """The sender's settings, where ``count`` members receive its weights."""
        if self.weight_sync == "auto":
            return self
        return replace(self, weight_sync_options={"receivers": count, **self.weight_sync_options})


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are generated in training."""

    samples_per_prompt: Positive = 8
    """Completions of each prompt: a group."""

    max_new_tokens: Positive = 64
    """Tokens at most, the end-of-sequence token included."""

    temperature: Annotated[float, Gt(0.0)] = 1.0
    """Divides the logits."""

    max_staleness: NonNegative = 0
    """Most weight versions between the one that began a sample and the one that trains on it. 0: rollouts and
    training take turns; above, rollouts run ahead, and samples under way go on with new weights."""

    dynamic_filtering: Literal["off", "drop", "refill"] = "off"
    """For a group whose rewards are all alike, which teaches nothing: train on it; leave it out; or sample other
    prompts in its place (DAPO's dynamic sampling)."""

    max_refills: Positive = 3
    """How often a step samples other prompts, with ``dynamic_filtering: refill``; then it uses the groups it has."""

    top_k: Positive | None = None
    """Sample from this many most likely tokens only. Log-probs are over all tokens, here as in training."""

    top_p: Annotated[float, Gt(0.0), Le(1.0)] = 1.0
    """Sample from the fewest most likely tokens that together have this probability; log-probs are over all tokens."""

    stop: tuple[str, ...] = ()
    """A completion ends once its text contains one of these; an environment sees them in the action."""

    env_path: str | None = None
    """The environment that answers completions and rewards them: ``path/to/script.py`` or ``package.module``, whose
    functions it is made of, or a class in it with ``:Name`` behind. None: one completion, which REWARD scores."""

    env_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's class."""

    env_isolated: bool = True
    """Run the environment in a process of its own, which can be killed; its ``extra_info`` holds plain data then.
    Otherwise it shares the engine's event loop: a call that blocks holds up every sample."""

    env_timeout_s: Annotated[float, Gt(0.0)] = 60.0
    """A call of the environment that takes longer is abandoned, and its sample counts as failed."""

    max_turns: Positive = 8
    """Actions of a sample at most, with an environment."""


@dataclass(frozen=True)
class RewardConfig:
    """How a completion is scored."""

    function: str | Mapping[str, float] = "dlrover.python.rl.environment.verifiers:exact"
    """``package.module:function``, called as ``function(completion, answer, extra_info)`` and returning a number; or
    several of these with their weights, whose weighted sum is the reward. They may be async."""

    model: str | None = None
    """Folder or hub name of a reward model, as ``recipe.rm`` saves one, whose score is the reward; the class of the
    role REWARD is ``ModelRewardWorkload`` then. None: ``function`` judges."""

    timeout_s: Annotated[float, Gt(0.0)] = 5.0
    """A call that takes longer is ended, and its sample counts as failed."""

    workers: Positive = 2
    """Processes of each reward member."""

    memory_mb: Positive | None = None
    """Address space of such a process in MB, its libraries included; more is a MemoryError there. None: no limit."""

    on_failure: Literal["drop_sample", "drop_group", "redraw"] = "drop_sample"
    """A failed sample is never trained on: leave it out; leave out its whole group; or generate the group again, and
    leave it out when one of its samples fails ``max_redraws`` times more."""

    max_redraws: Positive = 1
    """How often a step generates a group again, with ``on_failure: redraw``."""

    give_up_after: Positive = 5
    """A step whose failures leave nothing to train on is skipped. The run ends after so many of them in a row, or where
    the first step is one: a judge may be away for a while, a reward function that never worked is an error."""


@dataclass(frozen=True)
class PromptData:
    """Prompts to train and to evaluate on: rows of ``prompt`` or ``messages``, with ``answer``."""

    train: str | None = None
    """A file (``.json``, ``.jsonl``, ``.csv``, ``.parquet``, ``.arrow``), a folder or a hub name; ``split@`` before it
    picks a split. None: the environment makes the prompt, from the ``seed`` in ``extra_info``, which differs for each
    prompt."""

    eval: str | None = None
    """The same of prompts to evaluate on; None holds ``eval_rows`` out of ``train``, which are never trained on."""

    eval_rows: Positive = 200
    """Number of prompts to evaluate on."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """The data's names of columns: ``{prompt: question}``."""

    max_prompt_tokens: Positive | None = None
    """Tokens of a prompt at most, those of the chat template included. None: as many as the model can go on from."""

    over_long: Literal["refuse", "drop"] = "refuse"
    """For a prompt of more than ``max_prompt_tokens``, once the model is loaded: refuse the data, with the place of
    each; or leave it out, held-out ones too, and count it. A prompt is never cut."""


@dataclass(frozen=True)
class KeepConfig:
    """Models to keep besides the last one, ``model/``, all in Hugging Face format; and early stopping."""

    best: str | None = None
    """The metric of evaluations by which the best model is kept, in ``best/``: ``eval_loss``. None: none is."""

    best_is: Literal["lowest", "highest"] | None = None
    """Which value is the best. None: the lowest of what is called a loss, perplexity or kl, the highest of others."""

    patience: Annotated[int, Ge(0)] = 0
    """The run ends after this many evaluations in a row that were not better than the best; 0: it does not."""

    save_every: Annotated[int, Ge(0)] = 0
    """Write the model to ``steps/step-<number>`` every this many steps; 0: never."""

    keep_last: Annotated[int, Gt(0)] | None = 2
    """How many of these folders to keep, the newest ones; all others in ``steps`` are removed. None: keep all."""

    @property
    def prefers_low(self) -> bool:
        return self.best_is == "lowest" if self.best_is else (self.best or "").endswith(_LOSSES)


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases. Its other settings come from its environment variables."""

    project: str
    """The project's name."""

    name: str | None = None
    """The run's name; None: the job's."""


@dataclass(frozen=True)
class MlflowConfig:
    """MLflow."""

    experiment: str
    """The experiment's name."""

    name: str | None = None
    """The run's name; None: the job's."""

    uri: str | None = None
    """The tracking server; None: as MLflow's own environment variables say."""


@dataclass(frozen=True)
class LogConfig:
    """Where the metrics of a run go, beside ``metrics.jsonl`` and TensorBoard's events in its directory."""

    trackers: tuple[str | Mapping[str, Mapping[str, Any]], ...] = ()
    """Each is ``wandb``, ``mlflow``, an entry point of ``dlrover_rl.trackers`` or ``module:Class``; with options for
    its constructor, ``{name: {option: value}}``."""

    wandb: WandbConfig | None = None
    """Short for ``trackers: [{wandb: {...}}]``."""

    mlflow: MlflowConfig | None = None
    """Short for ``trackers: [{mlflow: {...}}]``."""

    show_samples: Annotated[int, Ge(0)] = 0
    """How many of a step's samples to show in the log of the console."""

    max_chars: Annotated[int, Gt(0)] = 200
    """Characters of each text shown there; all of it is in ``samples.jsonl``."""

    @property
    def tracker_options(self) -> dict[str, dict[str, Any]]:
        """The constructor arguments of each tracker, by its name."""
        items = [{item: {}} if isinstance(item, str) else item for item in self.trackers]
        options = {name: dict(values or {}) for item in items for name, values in item.items()}
        if self.wandb is not None:
            options["wandb"] = asdict(self.wandb)
        if self.mlflow is not None:
            options["mlflow"] = asdict(self.mlflow)
        return options


@dataclass(frozen=True)
class PolicyConfig:
    """The keys that trainers on samples share."""

    other_names: ClassVar[Mapping[str, str]] = {"actor.rollout.env_path": "rollout.env_path"}
    """Other names of keys."""

    model: str
    """Folder or hub name of a causal language model."""

    data: PromptData = PromptData()
    steps: Positive = 100
    """Training steps: each generates samples with the current policy, and learns from them."""

    updates_per_step: Positive = 1
    """Optimizer steps of one pass over a step's samples; each is in one of them."""

    epochs: Positive = 1
    """Passes over a step's samples."""

    prompts_per_step: Positive = 16
    """Prompts of one step; each is sampled ``rollout.samples_per_prompt`` times."""

    seed: NonNegative = 0
    """Decides the order of the data and every sample."""

    eval_every: NonNegative = 0
    """Evaluate every this many steps; 0: before and after only."""

    algorithm: Mapping[str, Any] = field(default_factory=dict)
    """``name`` of the algorithm, and its options; without a name it is the trainer's own."""

    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    engine: EngineConfig = EngineConfig()
    keep: KeepConfig = KeepConfig()
    log: LogConfig = LogConfig()


def training_sampling(rollout: RolloutConfig) -> SamplingParams:
    """The sampling of completions to train on."""
    return SamplingParams(
        rollout.max_new_tokens,
        rollout.temperature,
        rollout.samples_per_prompt,
        rollout.top_k,
        rollout.top_p,
        rollout.stop,
        keep_stop=rollout.env_path is not None,  # It is among the tokens, so the state that goes on from them has it.
    )


def greedy_sampling(rollout: RolloutConfig) -> SamplingParams:
    """The sampling of answers to held-out prompts."""
    return replace(training_sampling(rollout), temperature=0.0, samples_per_prompt=1)


def validate_model(model: str, where: str = "config.model") -> list[ConfigError]:
    """A model given as a path must exist; a hub name is looked up when it is loaded."""
    if not model:
        return []  # reported already: it is required
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    folder = Path(model).expanduser()
    if looks_like_path and not folder.is_dir():
        return [ConfigError(where, f"no such folder: {model}")]
    if folder.is_dir() and not (folder / "config.json").is_file():
        return [ConfigError(where, f"{model} holds no model: it has no config.json")]
    return []
