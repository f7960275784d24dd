"""What a job file's ``config`` holds for the ready recipes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from dlrover.python.rl.common.errors import Problem
from dlrover.python.rl.engine.base import LoraSettings, OptimizerConfig, SamplingParams
from dlrover.python.rl.engine.layout import ParallelSizes
from dlrover.python.rl.recipe.keeping import KeepConfig
from dlrover.python.rl.recipe.trackers import LogConfig

Positive = Annotated[int, Gt(0)]
NonNegative = Annotated[int, Ge(0)]


@dataclass(frozen=True)
class EngineConfig:
    """How engines run, the same for every role."""

    train: str = "fsdp2"
    """The train engine: ``fsdp2``, ``deepspeed``, ``megatron`` or one that has been registered."""

    train_options: Mapping[str, Any] = field(default_factory=dict)
    """What only this train engine can be told: ``{zero_stage: 2}`` of deepspeed."""

    rollout: str = "torch"
    """The rollout engine: ``torch``, ``vllm``, ``sglang`` or one that has been registered."""

    rollout_options: Mapping[str, Any] = field(default_factory=dict)
    """What only this rollout engine can be told."""

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
    """Most sequences that a rollout engine decodes at a time."""

    rollout_tensor_parallel_size: Positive = 1
    """Devices over which each rollout member splits the model, where the engine can."""

    gpu_memory_utilization: Annotated[float, Gt(0.0), Le(1.0)] = 0.85
    """Share of a device that a rollout engine's weights and key-value cache may fill."""

    threads: Positive | None = None
    """CPU threads of each member; None leaves it to the environment (``OMP_NUM_THREADS``). Their number decides the
    order in which some sums are taken: give it for results that agree to the bit on machines of different sizes."""


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are drawn in training."""

    samples_per_prompt: Positive = 8
    """Completions of each prompt: a group."""

    max_new_tokens: Positive = 64
    """Tokens at most, the end-of-sequence token included."""

    temperature: Annotated[float, Gt(0.0)] = 1.0
    """Divides the logits."""

    max_staleness: NonNegative = 0
    """How many weights may have been served since those that began a sample when it is trained on. 0: rollouts and
    training take turns; above, rollouts run ahead, and samples under way go on with new weights."""

    dynamic_filtering: Literal["off", "drop", "refill"] = "off"
    """What becomes of a group whose rewards are all alike, which teaches nothing: it is trained on all the same; left
    out; or other prompts are drawn in its place (DAPO's dynamic sampling)."""

    max_refills: Positive = 3
    """How often a step draws other prompts, with ``dynamic_filtering: refill``; then it does with what it has."""

    top_k: Positive | None = None
    """Draw from the most likely so many tokens only. The log-probs are those of all tokens, here as in training."""

    top_p: Annotated[float, Gt(0.0), Le(1.0)] = 1.0
    """Draw from the fewest most likely tokens that together have this probability; the same of the log-probs."""

    stop: tuple[str, ...] = ()
    """A completion ends once its text holds one of these; an environment sees them in the action."""

    env_path: str | None = None
    """The environment that answers completions and rewards them: ``path/to/script.py`` or ``package.module``, whose
    functions it is made of, or a class in it with ``:Name`` behind. None: one completion, which REWARD judges."""

    env_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's class."""

    env_isolated: bool = True
    """Run the environment in a process of its own, which can be killed; its ``extra_info`` holds plain data then.
    Otherwise it shares the engine's event loop: a call that blocks holds up every sample."""

    env_timeout_s: Annotated[float, Gt(0.0)] = 60.0
    """A call of the environment that takes longer is given up, and its sample counts as failed."""

    max_turns: Positive = 8
    """Actions of a sample at most, with an environment."""


@dataclass(frozen=True)
class RewardConfig:
    """How a completion is judged."""

    function: str | Mapping[str, float] = "dlrover.python.rl.environment.verifiers:exact"
    """``package.module:function``, called as ``function(completion, answer, extra_info)`` and returning a number; or
    several of these with their weights, whose weighted sum is the reward. They may be async."""

    model: str | None = None
    """Folder or hub name of a reward model, as ``recipe.rm`` saves one, whose score is the reward; the class of the
    role REWARD is ``ModelRewardWorkload`` then. None: ``function`` judges."""

    timeout_s: Annotated[float, Gt(0.0)] = 5.0
    """A call that takes longer is ended, and its sample counts as failed."""

    workers: Positive = 2
    """Processes of each reward member, which judge side by side."""

    memory_mb: Positive | None = None
    """Address space of such a process in MB, its libraries included; more is a MemoryError there. None: no limit."""

    on_failure: Literal["drop_sample", "drop_group", "redraw"] = "drop_sample"
    """What becomes of a failed sample, which is never trained on: it is left out alone; its prompt's whole group is; or
    the group is drawn anew, and left out when one of its samples fails ``max_redraws`` times more."""

    max_redraws: Positive = 1
    """How often a step draws a group anew, with ``on_failure: redraw``."""

    give_up_after: Positive = 5
    """A step whose failures leave nothing to train on is skipped. The run ends after so many of them in a row, or where
    the first step is one: a judge may be away for a while, a reward function that never worked is an error."""


@dataclass(frozen=True)
class PromptData:
    """Problems to train and to evaluate on: rows of ``prompt`` or ``messages``, with ``answer``."""

    train: str | None = None
    """A file (``.json``, ``.jsonl``, ``.csv``, ``.parquet``, ``.arrow``), a folder or a hub name; ``split@`` before it
    picks a split. None: the environment says itself what it begins with, by the ``seed`` in ``extra_info``, which is
    another for each prompt."""

    eval: str | None = None
    """The same of problems to evaluate on; None holds ``eval_rows`` out of ``train``, which are never trained on."""

    eval_rows: Positive = 200
    """How many problems to evaluate on."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """The data's own names of columns: ``{prompt: question}``."""

    max_prompt_tokens: Positive | None = None
    """Tokens of a prompt at most, those of the chat template included. None: as many as the model can go on from."""

    over_long: Literal["refuse", "drop"] = "refuse"
    """What becomes of a prompt of more than ``max_prompt_tokens``, once the model is loaded: the data are refused, with
    the place of each; or it is left out, held-out ones too, and counted. A prompt is never cut."""


@dataclass(frozen=True)
class PolicyConfig:
    """What trainers on samples have in common."""

    other_names: ClassVar[Mapping[str, str]] = {"actor.rollout.env_path": "rollout.env_path"}
    """What keys are called elsewhere."""

    model: str
    """Folder or hub name of a causal language model."""

    data: PromptData = PromptData()
    steps: Positive = 100
    """Training steps: each draws samples from the current policy, and learns from them."""

    updates_per_step: Positive = 1
    """Optimizer steps of one pass over a step's samples; each is in one of them."""

    epochs: Positive = 1
    """Passes over a step's samples."""

    prompts_per_step: Positive = 16
    """Prompts of one step; each is sampled ``rollout.samples_per_prompt`` times."""

    seed: NonNegative = 0
    """What the order of the data and every sample depend on."""

    eval_every: NonNegative = 0
    """Evaluate every so many steps; 0: before and after only."""

    algorithm: Mapping[str, Any] = field(default_factory=dict)
    """``name`` of the algorithm, and its options; without a name it is the trainer's own."""

    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    engine: EngineConfig = EngineConfig()
    keep: KeepConfig = KeepConfig()
    log: LogConfig = LogConfig()


@dataclass(frozen=True)
class GRPOConfig(PolicyConfig):
    """Group-relative policy optimisation, and others that need no further model."""


def training_sampling(rollout: RolloutConfig) -> SamplingParams:
    """How samples are drawn to train on."""
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
    """How held-out problems are answered."""
    return replace(training_sampling(rollout), temperature=0.0, samples_per_prompt=1)


def model_problems(model: str, where: str = "config.model") -> list[Problem]:
    """A model given as a path has to be there; a hub name is looked up when it is loaded."""
    if not model:
        return []  # said already: it is required
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    folder = Path(model).expanduser()
    if looks_like_path and not folder.is_dir():
        return [Problem(where, f"no such folder: {model}")]
    if folder.is_dir() and not (folder / "config.json").is_file():
        return [Problem(where, f"{model} holds no model: it has no config.json")]
    return []
