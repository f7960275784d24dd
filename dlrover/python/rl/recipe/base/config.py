# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: all settings that recipes share, each with its text for the reference
"""A job file's ``config`` for the ready recipes."""

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from dlrover.python.rl.config.typed import KEY_NAMES, Translation, names_by_alias
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, SamplingParams
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, TRAIN_ENGINES, engine_info
from dlrover.python.rl.engine.api.settings import ParallelSizes

Positive = Annotated[int, Gt(0)]
NonNegative = Annotated[int, Ge(0)]

MOST_TOKENS = 16384  # of one forward pass, by default

AUTO = "auto"

_LOSSES = ("loss", "nll", "perplexity", "kl", "failed")

EXAMPLE_NAMES: Mapping[str, str] = {**names_by_alias("all"), **names_by_alias("examples")}
"""Other libraries' names for the keys of recipes that learn from examples."""

POLICY_NAMES: Mapping[str, str | Translation] = {
    **names_by_alias("all"),
    **names_by_alias("policy"),
    **{name: Translation(ours["key"], ours["values"]) for name, ours in KEY_NAMES["translated"].items()},
}
"""Other libraries' names for the keys of recipes that learn from samples."""

ELSEWHERE: Mapping[str, str] = names_by_alias("answered")
"""Messages that answer other libraries' keys without an equivalent here."""

DISTILLATION_NAMES: Mapping[str, str | Translation] = {
    name: ours for name, ours in POLICY_NAMES.items() if name not in KEY_NAMES["answered in distillation"]
}

DISTILLATION_ELSEWHERE: Mapping[str, str] = {**ELSEWHERE, **KEY_NAMES["answered in distillation"]}
"""Messages that answer such keys in the recipe of distillation."""

METRIC_NAMES: Mapping[str, str] = names_by_alias("metrics")
"""The present name of each renamed metric; ``keep.best`` accepts both."""


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
    """Transport of weights from the actor to the rollouts: ``pull`` (rollouts map the actor's memory; on another
    host, one rollout fetches it over TCP for all), ``broadcast`` (gloo, or nccl on cuda), ``cuda_ipc``, an entry point
    or ``module:Class``. ``auto``: ``cuda_ipc`` on one device with room for it, else ``pull``."""

    weight_sync_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the transport: ``bucket_bytes``, ``timeout_s``."""

    device: str = AUTO
    """A torch device. ``cuda`` is each worker's own; ``cuda:0`` is the same one for all workers. ``auto``: ``cuda`` for
    ``trainer.device_type: GPU`` (without Ray, only if this machine has a CUDA device); else ``cpu``."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of passes; ``auto``: ``bf16`` on CUDA, else ``fp32``. Weights and moments are kept in float32."""

    save_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Data type of saved models; ``auto``: the data type of the files of ``model``. Checkpoints are always float32."""

    parallel: ParallelSizes | None = None
    """Parallelism of the actor; the workers that remain beside these dimensions shard the parameters. None: all workers
    shard them on CUDA; on a CPU, and with a base in 4 bits, each worker of fsdp2 holds a full copy, which it restores
    from its own file."""

    shard_frozen: bool = False
    """Each worker of a reference or teacher holds a part of the model instead of a copy. The classes of these roles are
    then ``ShardedReferenceWorkload`` and ``ShardedTeacherWorkload``."""

    lora: LoraSettings | None = None
    """Train LoRA adapters of the actor only, if the engine supports them; rollouts add them to the model."""

    max_tokens_per_microbatch: Positive | Literal["auto"] = MOST_TOKENS
    """Maximum tokens of one forward pass of a train engine; a longer row is a micro-batch by itself. ``auto``, the
    default on CUDA: 16384, or as many as fit the device's memory by the arithmetic of ``check``."""

    gradient_checkpointing: bool | Literal["auto"] = False
    """Recompute activations in the backward pass to save memory. ``auto``, the default on CUDA: recompute them
    if they would not fit, or if rows may be longer than planned (with an environment, or without
    ``data.max_prompt_tokens``)."""

    offload: bool | Literal["auto"] = "auto"
    """Move engines of roles that share a device to host memory between their calls; a rollout's moves once another
    worker waits for the device. ``auto``: move them if the device has no room for all engines, or if the length of rows
    is unbounded."""

    max_batch: Positive = 128
    """Maximum sequences that a rollout engine decodes at once. Default on CUDA: 256."""

    rollout_tensor_parallel_size: Positive = 1
    """Devices over which each rollout worker splits the model, if the engine supports it."""

    device_memory_gb: Annotated[float, Gt(0.0)] | None = None
    """Memory of a device in GB; a job that needs more by the arithmetic of ``check`` is refused. None: the memory of
    this machine's devices, if any; a job that needs more only gets a warning."""

    gpu_memory_utilization: Annotated[float, Gt(0.0), Le(1.0)] = 0.85
    """Fraction of device memory for the weights and the key-value cache of a rollout engine."""

    mask_unknown_ids: bool = True
    """Recipes that sample: give probability 0 to token ids that the embedding has and the tokenizer lacks, in rollouts,
    training, reference and teachers. Such ids have no text, so no reward sees them. If this is False, or if one of the
    engines cannot mask ids (``sglang``), no engine does, and the metric ``completions/unknown_ids`` counts them."""

    threads: Positive | None = None
    """CPU threads of each worker; some sums depend on their number. None: the value of ``OMP_NUM_THREADS``."""

    @property
    def dtype(self) -> Literal["fp32", "bf16"]:
        """The resolved ``precision``."""
        return "bf16" if self.precision == "bf16" else "fp32"

    def resolve(self, on_cuda: bool) -> "EngineConfig":
        """Return these settings without ``auto``, except where it depends on the memory of a CUDA device."""
        has_vllm = on_cuda and importlib.util.find_spec("vllm") is not None
        resolved = replace(
            self,
            device=self.device if self.device != AUTO else "cuda" if on_cuda else "cpu",
            precision=self.precision if self.precision != AUTO else "bf16" if on_cuda else "fp32",
            rollout=self.rollout if self.rollout != AUTO else "vllm" if has_vllm else "torch",
        )
        # Both sides mask or neither does: otherwise the ratio of new to old policy would not begin at 1.
        infos = engine_info(TRAIN_ENGINES, resolved.train), engine_info(ROLLOUT_ENGINES, resolved.rollout)
        masks = self.mask_unknown_ids and all(info.masks_unknown_ids for info in infos)
        resolved = replace(resolved, mask_unknown_ids=masks)
        return resolved if resolved.device.startswith("cuda") else resolved.with_passes(MOST_TOKENS, recompute=False)

    def with_passes(self, tokens: int, recompute: bool) -> "EngineConfig":
        """Return a copy with these values in place of ``auto``."""
        limit = tokens if self.max_tokens_per_microbatch == AUTO else self.max_tokens_per_microbatch
        recomputes = recompute if self.gradient_checkpointing == AUTO else self.gradient_checkpointing
        return replace(self, max_tokens_per_microbatch=limit, gradient_checkpointing=recomputes)

    @property
    def tokens_of_a_pass(self) -> int:
        limit = self.max_tokens_per_microbatch
        return MOST_TOKENS if isinstance(limit, str) else limit

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
    """Leave samples that end at ``max_new_tokens`` out of the loss, but not out of the group's statistics."""

    temperature: Annotated[float, Gt(0.0)] = 1.0
    """Sampling temperature."""

    max_staleness: NonNegative = 0
    """Maximum weight versions between the weights that started a sample and those that train on it. 0: generation and
    training alternate. Above 0: rollouts run ahead, and unfinished samples continue with new weights."""

    dynamic_filtering: Literal["off", "drop", "refill"] = "off"
    """Treatment of groups with equal rewards, which have no gradient: train on them; drop them; or replace them with
    samples of other prompts (dynamic sampling of DAPO)."""

    max_refills: Positive = 3
    """Limit of ``dynamic_filtering: refill``: a step samples at most ``(1 + max_refills) * prompts_per_step`` groups;
    then it uses the groups it has."""

    top_k: Positive | None = None
    """Sample from this many most likely tokens. Log-probs are over all tokens, here and in training."""

    top_p: Annotated[float, Gt(0.0), Le(1.0)] = 1.0
    """Sample from the smallest set of most likely tokens with this total probability; log-probs are over all tokens."""

    stop: tuple[str, ...] = ()
    """Stop strings: a completion ends when its text contains one. With an environment, the action keeps it."""

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
    """Treatment of an unfinished step without ``next_state``: the sample counts as failed, or the episode ends."""

    env_failure_reward: float | None = None
    """Reward of an action on which ``step`` raises or times out, which ends the episode. None: the sample counts as
    failed."""

    max_turns: Positive = 8
    """Maximum actions of a sample, with an environment or an agent."""


@dataclass(frozen=True)
class AgentConfig:
    """An agent that acts by requests to the policy and rewards itself."""

    agent: str | None = None
    """The agent: ``package.module:function`` or ``path/to/script.py:function`` of ``async def run(client, row)``, or a
    class with such a method. None: no agent."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function or class."""

    timeout_s: Annotated[float, Gt(0.0)] = 600.0
    """Timeout of an episode with all its tries; its sample then counts as failed."""

    max_tokens: Positive | None = None
    """Maximum tokens that the policy generates in an episode."""

    max_open: Positive = 16
    """Maximum open requests of an episode at a time."""

    on_loss: Literal["replay", "redraw"] = "replay"
    """Treatment of an episode whose agent loses its process. ``replay``: the agent begins again, and its requests are
    answered from the record up to the loss. ``redraw``: it begins again with other actions."""

    host: str = "127.0.0.1"
    """The address on which each rollout worker listens for its agents, and to which they send their requests."""


@dataclass(frozen=True)
class RewardConfig:
    """Scoring of completions."""

    function: str | Mapping[str, float] = "dlrover.python.rl.environment.verifiers:exact"
    """``package.module:function``, sync or async: ``function(completion, answer, extra_info)`` returns a number. A
    function with other parameters receives ``completion``, ``prompt``, ``answer`` and columns of the row by name; one
    with ``solution_str`` is called as in verl; one with ``completions`` as in TRL, with lists over all samples that a
    worker scores at once. A mapping of functions to weights: the reward is the weighted sum."""

    model: str | None = None
    """Folder or hub name of a reward model, as saved by ``recipe.rm``, whose score is the reward; the role REWARD must
    then be of class ``ModelRewardWorkload``. None: use ``function``."""

    thoughts: Literal["ignored", "scored"] = "ignored"
    """Treatment of a model's thoughts before its answer (``<think>...</think>``) by built-in functions and judges.
    ``ignored``: they score only the answer, and unfinished thoughts have reward 0. ``scored``: they score both. Other
    functions and reward models always get both, except functions decorated with ``ignore_thoughts``."""

    timeout_s: Annotated[float, Gt(0.0)] = 5.0
    """Timeout per sample of a call; samples of a call that exceeds it count as failed."""

    workers: Positive = 2
    """Processes of each worker of REWARD."""

    memory_mb: Positive | None = None
    """Address space of each process in MB, libraries included; beyond it a MemoryError is raised. None: no limit."""

    on_failure: Literal["drop_sample", "drop_group", "redraw"] = "drop_sample"
    """Treatment of failed samples, which are never trained on: drop the sample; drop its group; or generate the group
    again, and drop it after ``max_redraws`` further failures."""

    max_redraws: Positive = 1
    """Maximum repetitions of a group, for ``on_failure: redraw``."""

    give_up_after: Positive = 5
    """End the run after this many steps in a row without a usable sample, or if the first step has none."""


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
        """``best`` by its present name."""
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
    """``wandb``, ``mlflow``, ``trackio``, an entry point of ``dlrover_rl.trackers`` or ``module:Class``, each with
    optional constructor arguments: ``{name: {option: value}}``."""

    wandb: WandbConfig | None = None
    """Short for ``trackers: [{wandb: {...}}]``."""

    mlflow: MlflowConfig | None = None
    """Short for ``trackers: [{mlflow: {...}}]``."""

    samples: Literal["all", "off"] | Positive = "all"
    """Samples of a step in ``samples.jsonl``: all, none (``off``), or this many from the first prompts, with all
    sequences of each."""

    token_samples: NonNegative = 4
    """Samples of a step whose rows in ``samples.jsonl`` have lists of tokens, with log-probs and advantages."""

    samples_every: NonNegative = 20
    """Send samples as a table to TensorBoard and the trackers in step 1 and every this many steps; 0: never."""

    samples_rows: Positive = 16
    """Rows of such a table."""

    show_samples: Annotated[int, Ge(0)] = 0
    """Number of samples per step to print on the console."""

    max_chars: Annotated[int, Gt(0)] = 200
    """Maximum characters of each printed text; ``samples.jsonl`` has the whole text."""

    @property
    def tracker_options(self) -> dict[str, dict[str, Any]]:
        """The constructor arguments of each tracker by name."""
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
    """Prompts for evaluation, in the same form; or a mapping of set names to sources, each set with its own metrics.
    None: ``eval_rows`` prompts are held out of ``train``."""

    eval_rows: Annotated[int, Gt(0)] | None = None
    """Number of evaluation prompts per set. None: the first 200 of ``eval``, or a tenth of ``train`` but at most
    200. If ``train`` repeats a single prompt, that prompt is the set. If the environment creates the prompts, 64."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """Column names of the data: ``{prompt: question}``."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model's chat template for prompts of messages, such as ``{enable_thinking: false}`` or
    ``tools``. They override the environment's arguments; a row's own arguments override both."""

    max_prompt_tokens: Annotated[int, Gt(0)] | None = None
    """Maximum tokens of a prompt, chat template included. None: the limit of the model."""

    over_long: Literal["refuse", "drop"] = "refuse"
    """Treatment of prompts longer than ``max_prompt_tokens``, evaluation prompts included, when the model is loaded:
    refuse the data and name them; or drop and count them. Prompts are never cut."""

    @property
    def eval_sets(self) -> dict[str, str]:
        """The sets of ``eval`` by name; a single set has an empty name."""
        if self.eval is None:
            return {}
        return {"": self.eval} if isinstance(self.eval, str) else dict(self.eval)


@dataclass(frozen=True)
class EvalConfig:
    """Generation of answers to evaluation prompts."""

    samples: Annotated[int, Gt(0)] = 1
    """Answers to each prompt. Above 1 adds the metrics ``avg@<samples>``, the mean reward, and, where rewards are 0 or
    1, ``pass@<k>``: the unbiased estimate of the probability that one of k answers is right, for ``samples`` and the
    powers of 2 below it (equation 1 of arXiv:2107.03374)."""

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
    environment: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()
    engine: EngineConfig = EngineConfig()
    model_config: str | None = None
    """The ``config.json`` of ``model``, or a folder with it, to compute memory without the model's files."""

    keep: KeepConfig = KeepConfig()
    log: LogConfig = LogConfig()

    @cached_property
    def has_environment(self) -> bool:
        """True if an environment or an agent rewards the samples, not the role REWARD."""
        return self.rollout.env_path is not None or self.environment.agent is not None


def training_sampling(rollout: RolloutConfig) -> SamplingParams:
    return SamplingParams(
        rollout.max_new_tokens,
        rollout.temperature,
        rollout.samples_per_prompt,
        rollout.top_k,
        rollout.top_p,
        rollout.stop,
        keep_stop=rollout.env_path is not None,  # the next state continues the tokens, stop string included
    )
