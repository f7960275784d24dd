# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: all settings that recipes share, each with its text for the reference
"""A job file's ``config`` for the ready recipes."""

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from dlrover.python.rl.config.typed import KEY_NAMES, Translation, names_by_alias
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, SamplingParams
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, TRAIN_ENGINES, engine_info
from dlrover.python.rl.engine.api.settings import ParallelSizes

Positive = Annotated[int, Gt(0)]
NonNegative = Annotated[int, Ge(0)]

MOST_TOKENS = 16384
"""Of a pass, unless more are asked for."""

AUTO = "auto"

_LOSSES = ("loss", "nll", "perplexity", "kl", "failed")


# -- other names: keys of RL2, TRL, OpenRLHF and verl, and former names of metrics -----------------------------------

EXAMPLE_NAMES: Mapping[str, str] = {**names_by_alias("all"), **names_by_alias("examples")}
"""Keys of recipes that learn from examples."""

POLICY_NAMES: Mapping[str, str | Translation] = {
    **names_by_alias("all"),
    **names_by_alias("policy"),
    **{name: Translation(ours["key"], ours["values"]) for name, ours in KEY_NAMES["translated"].items()},
}
"""Keys of recipes that learn from samples."""

ELSEWHERE: Mapping[str, str] = names_by_alias("answered")
"""Answers to keys that have no equal."""

DISTILLATION_NAMES: Mapping[str, str | Translation] = {
    name: ours for name, ours in POLICY_NAMES.items() if name not in KEY_NAMES["answered in distillation"]
}
"""Keys of the recipe that learns from teachers."""

DISTILLATION_ELSEWHERE: Mapping[str, str] = {**ELSEWHERE, **KEY_NAMES["answered in distillation"]}
"""Answers to keys there."""

METRIC_NAMES: Mapping[str, str] = names_by_alias("metrics")
"""The name of each metric that had another one; ``keep.best`` may be either."""


# -- settings ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the engines, the same for every role."""

    train: str = "fsdp2"
    """The train engine: ``fsdp2``, ``deepspeed``, ``megatron``, an entry point or ``module:Class``."""

    train_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of this train engine: ``{zero_stage: 2}`` for deepspeed."""

    rollout: str = AUTO
    """The rollout engine: ``torch``, ``vllm``, ``sglang``, an entry point or ``module:Class``. ``auto``: ``vllm`` on
    CUDA where it is installed, else ``torch``."""

    rollout_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of this rollout engine."""

    weight_sync: str = "auto"
    """Transport of weights from the actor to the rollouts: ``pull`` (rollouts map the actor's memory, or one of a host
    fetches them over TCP), ``disk``, ``broadcast`` (gloo, or nccl on cuda), ``cuda_ipc``, an entry point or
    ``module:Class``. ``auto``: ``cuda_ipc`` on one device with room for it, else ``pull``."""

    weight_sync_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the transport: ``folder``, ``bucket_bytes``, ``timeout_s``."""

    device: str = AUTO
    """A torch device. ``cuda`` is each worker's own; ``cuda:0`` is the same one for all workers. ``auto``: ``cuda`` for
    ``trainer.device_type: GPU``, in one process or under ``torchrun`` where there is one."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of forward and backward passes; ``auto``: ``bf16`` on CUDA, else ``fp32``. Masters, moments and sums: float32."""

    save_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Data type of saved models; ``auto``: that of the files of ``model``. Checkpoints are always float32."""

    parallel: ParallelSizes | None = None
    """Parallelism of the actor; the remaining workers shard the parameters. None: all shard them on CUDA; on a CPU, and
    with a base in 4 bits, each worker of fsdp2 holds a full copy, which it restores from its own file."""

    shard_frozen: bool = False
    """The workers of a reference and of a teacher hold a part of the model each instead of a copy. Their classes are
    then ``ShardedReferenceWorkload`` and ``ShardedTeacherWorkload``."""

    lora: LoraSettings | None = None
    """Train LoRA adapters of the actor only, if the engine supports them; rollouts add them to the model."""

    max_tokens_per_microbatch: Positive | Literal["auto"] = MOST_TOKENS
    """Maximum tokens of one forward pass of a train engine; a longer row is a micro-batch by itself. ``auto``, the
    default on CUDA: 16384, or as many as fit the device's memory by the arithmetic of ``check``."""

    gradient_checkpointing: bool | Literal["auto"] = False
    """Recompute activations in the backward pass to save memory. ``auto``, the default on CUDA: where they do not fit
    otherwise, or rows may be longer than planned (without ``data.max_prompt_tokens``, with an environment)."""

    offload: bool | Literal["auto"] = "auto"
    """Whether roles that share a device leave it for each other; ``auto``: unless all fit, and rows are bounded."""

    max_batch: Positive = 128
    """Maximum sequences that a rollout engine decodes at once. Default on CUDA: 256."""

    rollout_tensor_parallel_size: Positive = 1
    """Devices over which each rollout worker splits the model, if the engine supports it."""

    device_memory_gb: Annotated[float, Gt(0.0)] | None = None
    """Memory of a device in GB: a job that needs more by the arithmetic of ``check`` is refused. None: that of this
    machine's devices, if any, and a warning."""

    gpu_memory_utilization: Annotated[float, Gt(0.0), Le(1.0)] = 0.85
    """Fraction of device memory for the weights and the key-value cache of a rollout engine."""

    mask_unknown_ids: bool = True
    """Recipes that sample: ids that the tokenizer does not have, of rows that fill up the embedding, have
    probability 0 in rollouts, training, reference and teachers. They have no text, so no reward sees them. False, or
    with an engine that cannot mask them on one side (``sglang``): on no side, and the metric
    ``completions/unknown_ids`` counts them."""

    threads: Positive | None = None
    """CPU threads of each worker, on which the order of some sums depends; None: as ``OMP_NUM_THREADS`` says."""

    @property
    def dtype(self) -> Literal["fp32", "bf16"]:
        """``precision``, once it is resolved."""
        return "bf16" if self.precision == "bf16" else "fp32"

    def resolve(self, on_cuda: bool) -> "EngineConfig":
        """These settings without ``auto``, but for what depends on the memory of a CUDA device."""
        has_vllm = on_cuda and importlib.util.find_spec("vllm") is not None
        resolved = replace(
            self,
            device=self.device if self.device != AUTO else "cuda" if on_cuda else "cpu",
            precision=self.precision if self.precision != AUTO else "bf16" if on_cuda else "fp32",
            rollout=self.rollout if self.rollout != AUTO else "vllm" if has_vllm else "torch",
        )
        # Both sides or neither: else the ratio of new to old policy would not begin at 1.
        infos = engine_info(TRAIN_ENGINES, resolved.train), engine_info(ROLLOUT_ENGINES, resolved.rollout)
        masks = self.mask_unknown_ids and all(info.masks_unknown_ids for info in infos)
        resolved = replace(resolved, mask_unknown_ids=masks)
        on_device = resolved.device.startswith("cuda")
        return resolved if on_device else resolved.with_passes(MOST_TOKENS, recompute=False)

    def with_passes(self, tokens: int, recompute: bool) -> "EngineConfig":
        """The same with these in place of ``auto``."""
        most = tokens if self.max_tokens_per_microbatch == AUTO else self.max_tokens_per_microbatch
        recomputes = recompute if self.gradient_checkpointing == AUTO else self.gradient_checkpointing
        return replace(self, max_tokens_per_microbatch=most, gradient_checkpointing=recomputes)

    @property
    def tokens_of_a_pass(self) -> int:
        most = self.max_tokens_per_microbatch
        return MOST_TOKENS if isinstance(most, str) else most

    @property
    def recomputes(self) -> bool:
        return self.gradient_checkpointing is not False


@dataclass(frozen=True)
class SenderConfig(EngineConfig):
    receivers: Positive = 1  # workers that receive this one's weights


@dataclass(frozen=True)
class RolloutConfig:
    """Generation of completions in training."""

    samples_per_prompt: Positive = 8
    """Completions of each prompt; together they are a group."""

    max_new_tokens: Positive = 64
    """Maximum tokens of a completion, the end-of-sequence token included. Default on CUDA: 1024."""

    mask_truncated: bool = False
    """Leave samples that end at ``max_new_tokens`` out of the loss; their rewards remain in the group's statistics
    (overlong filtering, arXiv:2503.14476)."""

    temperature: Annotated[float, Gt(0.0)] = 1.0
    """Sampling temperature."""

    max_staleness: NonNegative = 0
    """Maximum weight versions between the weights that started a sample and those that train on it. 0: generation and
    training alternate. Above 0: rollouts run ahead, and unfinished samples continue with new weights."""

    dynamic_filtering: Literal["off", "drop", "refill"] = "off"
    """Treatment of groups with equal rewards, which have no gradient: train on them; drop them; or replace them with
    samples of other prompts (dynamic sampling of DAPO)."""

    max_refills: Positive = 3
    """Maximum rounds of replacement in a step, for ``dynamic_filtering: refill``; after them the step uses the groups
    it has."""

    top_k: Positive | None = None
    """Sample from this many most likely tokens. Log-probs are over all tokens, here and in training."""

    top_p: Annotated[float, Gt(0.0), Le(1.0)] = 1.0
    """Sample from the smallest set of most likely tokens with this total probability; log-probs are over all tokens."""

    stop: tuple[str, ...] = ()
    """Stop strings: a completion ends when its text contains one. With an environment they remain part of the
    action."""

    env_path: str | None = None
    """The environment that rewards completions: ``path/to/script.py`` or ``package.module`` with its functions, or
    ``...:Name`` for a class. None: a single completion per sample, scored by the role REWARD."""

    env_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's class."""

    env_isolated: bool = True
    """Run the environment in a separate process, which can be killed; ``extra_info`` must then be plain data. False: it
    runs in the event loop of the engine, where a blocking call delays every sample."""

    env_timeout_s: Annotated[float, Gt(0.0)] = 60.0
    """Timeout of a call of the environment; its sample then counts as failed."""

    env_missing_state: Literal["error", "done"] = "error"
    """Treatment of a step that is not done and lacks ``next_state``: its sample counts as failed; or the episode is
    over, as it is with a ``next_state`` of None."""

    env_failure_reward: float | None = None
    """Reward of an action on which ``step`` fails, by an exception or its timeout; the episode ends with it. None: its
    sample counts as failed."""

    max_turns: Positive = 8
    """Maximum actions of a sample, with an environment."""


@dataclass(frozen=True)
class RewardConfig:
    """Scoring of completions."""

    function: str | Mapping[str, float] = "dlrover.python.rl.environment.verifiers:exact"
    """``package.module:function``, sync or async: ``function(completion, answer, extra_info)`` returns a number; one
    with other parameters is given ``completion``, ``prompt``, ``answer`` and columns of the row by name; one with
    ``solution_str`` is verl's; one with ``completions`` is TRL's, with lists over all samples that a worker scores at
    once. Or a mapping of functions to weights, whose weighted sum is the reward."""

    model: str | None = None
    """Folder or hub name of a reward model, as saved by ``recipe.rm``, whose score is the reward; the role REWARD must
    then be of class ``ModelRewardWorkload``. None: use ``function``."""

    thoughts: Literal["ignored", "scored"] = "ignored"
    """Treatment of what a model thinks before its answer (``<think>...</think>``): built-in functions and judges score
    the answer, and unfinished thoughts have reward 0; or they score both. Other functions and reward models always get
    both, except functions that ``ignore_thoughts`` decorates."""

    timeout_s: Annotated[float, Gt(0.0)] = 5.0
    """Timeout for each sample of a call; they then count as failed."""

    workers: Positive = 2
    """Processes of each worker of REWARD."""

    memory_mb: Positive | None = None
    """Address space of each process in MB, libraries included; exceeding it raises MemoryError there. None: no
    limit."""

    on_failure: Literal["drop_sample", "drop_group", "redraw"] = "drop_sample"
    """Treatment of failed samples, which are never trained on: drop the sample; drop its group; or generate the group
    again, and drop it after ``max_redraws`` further failures."""

    max_redraws: Positive = 1
    """Maximum repetitions of a group, for ``on_failure: redraw``."""

    give_up_after: Positive = 5
    """A step without any usable sample is skipped. The run fails after this many such steps in a row, or if the first
    step is one."""


@dataclass(frozen=True)
class KeepConfig:
    """Models to keep besides the final one (``model/``), in Hugging Face format; and early stopping."""

    best: str | None = None
    """Evaluation metric that selects the best model, kept in ``best/``: ``eval/loss``. None: not kept."""

    best_is: Literal["lowest", "highest"] | None = None
    """Direction of the metric. None: lowest for losses, perplexities and KLs, highest for others."""

    patience: Annotated[int, Ge(0)] = 0
    """End the run after this many evaluations in a row without improvement; 0: never."""

    save_every: Annotated[int, Ge(0)] = 0
    """Save the model to ``steps/step-<number>`` every this many steps; 0: never."""

    keep_last: Annotated[int, Gt(0)] | None = 2
    """Number of newest folders to keep in ``steps``; older ones are removed. None: keep all."""

    @property
    def prefers_low(self) -> bool:
        return self.best_is == "lowest" if self.best_is else (self.best or "").endswith(_LOSSES)

    @property
    def metric(self) -> str | None:
        """``best``, by its name of today."""
        return None if self.best is None else METRIC_NAMES.get(self.best, self.best)


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases. Other settings come from its environment variables."""

    project: str
    """Project name."""

    name: str | None = None
    """Run name; None: the job's."""


@dataclass(frozen=True)
class MlflowConfig:
    """MLflow."""

    experiment: str
    """Experiment name."""

    name: str | None = None
    """Run name; None: the job's."""

    uri: str | None = None
    """The tracking server; None: from the environment variables of MLflow."""


@dataclass(frozen=True)
class LogConfig:
    """Destinations of metrics besides ``metrics.jsonl`` and TensorBoard."""

    trackers: tuple[str | Mapping[str, Mapping[str, Any]], ...] = ()
    """``wandb``, ``mlflow``, an entry point of ``dlrover_rl.trackers`` or ``module:Class``, each with optional
    constructor arguments: ``{name: {option: value}}``."""

    wandb: WandbConfig | None = None
    """Short for ``trackers: [{wandb: {...}}]``."""

    mlflow: MlflowConfig | None = None
    """Short for ``trackers: [{mlflow: {...}}]``."""

    samples: Literal["all", "off"] | Positive = "all"
    """Samples of a step in ``samples.jsonl``: all, none (``off``), or the first so many in the order of the step's
    prompts, with all sequences of each."""

    samples_every: NonNegative = 20
    """Send samples as a table to TensorBoard and the trackers in step 1 and every this many steps; 0: never."""

    samples_rows: Positive = 16
    """Rows of such a table."""

    show_samples: Annotated[int, Ge(0)] = 0
    """Number of samples per step to print on the console."""

    max_chars: Annotated[int, Gt(0)] = 200
    """Maximum characters of each printed text; ``samples.jsonl`` has all of it."""

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
class PromptData:
    """Prompts for training and evaluation: rows of ``prompt`` or ``messages``, with ``answer``."""

    train: str | None = None
    """A file (``.json``, ``.jsonl``, ``.csv``, ``.parquet``, ``.arrow``), a folder or a hub name; the prefix ``split@``
    selects a split. None: the environment creates prompts from ``extra_info["seed"]``, one of 16,384 numbers."""

    eval: str | Mapping[str, str] | None = None
    """Prompts for evaluation, given in the same way; or several sets of them by name, each with its own metrics. None:
    ``eval_rows`` prompts are held out of ``train``."""

    eval_rows: Annotated[int, Gt(0)] | None = None
    """Number of evaluation prompts of each set. None: at most 200, the first of ``eval`` or a tenth of ``train``; if
    ``train`` repeats a single prompt, that one; 64 without data."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """Column names of the data: ``{prompt: question}``."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model's chat template for prompts of messages, such as ``{enable_thinking: false}`` or
    ``tools``. They take the place of those that an environment declares, and a row's own take theirs."""

    max_prompt_tokens: Annotated[int, Gt(0)] | None = None
    """Maximum tokens of a prompt, chat template included. None: the limit of the model."""

    over_long: Literal["refuse", "drop"] = "refuse"
    """Treatment of prompts longer than ``max_prompt_tokens``, evaluation prompts included, when the model is loaded:
    refuse the data and name them; or drop and count them. Prompts are never cut."""

    @property
    def sources(self) -> dict[str, str]:
        """All of them by their keys."""
        sets = {f"eval.{name}" if name else "eval": source for name, source in self.eval_sets.items()}
        return ({"train": self.train} if self.train else {}) | sets

    @property
    def eval_sets(self) -> dict[str, str]:
        """The sets of ``eval`` by name, which is empty for a single one; none if it is None."""
        if self.eval is None:
            return {}
        return {"": self.eval} if isinstance(self.eval, str) else dict(self.eval)


@dataclass(frozen=True)
class EvalConfig:
    """Generation of answers to evaluation prompts."""

    samples: Annotated[int, Gt(0)] = 1
    """Answers to each prompt. Above 1 there are the metrics ``avg@<samples>``, the mean reward, and, where rewards are
    0 or 1, ``pass@<k>``: the probability that one of k answers is right, estimated without bias for the powers of 2 up
    to ``samples``, and for ``samples`` (equation 1 of arXiv:2107.03374)."""

    temperature: Annotated[float, Ge(0.0)] = 0.0
    """Sampling temperature; 0: greedy. Above 0, ``rollout.top_k`` and ``rollout.top_p`` apply."""


@dataclass(frozen=True)
class PolicyConfig:
    """Settings shared by trainers that learn from samples."""

    other_names: ClassVar[Mapping[str, str | Translation]] = POLICY_NAMES
    elsewhere: ClassVar[Mapping[str, str]] = ELSEWHERE
    named: ClassVar[tuple[str, ...]] = ("algorithm",)

    model: str
    """Folder or hub name of a causal language model."""

    data: PromptData = PromptData()
    steps: Positive = 100
    """Training steps. Each generates samples with the current policy and trains on them."""

    updates_per_step: Positive = 1
    """Optimizer steps of one pass over the samples of a step; each sample is in one of them."""

    epochs: Positive = 1
    """Passes over the samples of a step."""

    prompts_per_step: Positive = 16
    """Prompts of a step, each sampled ``rollout.samples_per_prompt`` times. Default on CUDA: 64."""

    seed: NonNegative = 0
    """Seed of the data order and of sampling."""

    eval_every: NonNegative = 0
    """Evaluate every this many steps; 0: before and after training only."""

    eval_only: bool = False
    """Evaluate ``model`` and end: nothing is trained, and no model is saved."""

    eval: EvalConfig = EvalConfig()
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    """``name`` of the algorithm and its options; the default name depends on the recipe."""

    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    engine: EngineConfig = EngineConfig()
    model_config: str | None = None
    """The ``config.json`` of ``model``, or a folder with it, for the arithmetic of memory where the model's files are
    not on this machine. None: that of ``model``."""

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
