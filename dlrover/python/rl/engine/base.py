"""The ports of this room: what a train engine and a rollout engine can be asked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Le

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.layout import Layout, ParallelSizes
from dlrover.python.rl.engine.offload import Offloadable
from dlrover.python.rl.engine.optimizing import OptimizerConfig as OptimizerConfig  # a part of this port

if TYPE_CHECKING:
    from dlrover.python.rl.engine.weights import WeightSnapshot

# -- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters instead of full training; what is published is merged, ``W + B A alpha / rank``.

    With ``precision: bf16`` the model beside them is kept in bf16: what is published and saved is so rounded.
    """

    rank: Annotated[int, Gt(0)] = 16
    """Rank of the adapters."""

    alpha: Annotated[float, Gt(0.0)] = 32.0
    """Scale: the adapters' product counts ``alpha / rank`` times."""

    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Last parts of the names of the linear layers that get adapters."""


@dataclass(frozen=True)
class TrainSettings:
    """How a train engine runs, whatever its backend."""

    device: str = "cpu"
    """A torch device."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the forward and backward pass. Masters, optimizer and gradient reduction are float32 in either case."""

    max_tokens_per_microbatch: Annotated[int, Gt(0)] = 16384
    """Most tokens of one forward pass; a longer row comes alone."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    parallel: ParallelSizes = ParallelSizes()
    """How the ranks divide the model."""

    lora: LoraSettings | None = None
    """Train adapters only."""

    head: Literal["causal", "token"] = "causal"
    """``causal``: a language model, whose outputs are log-probs. ``token``: a token-classification model of one label
    (critic, reward model), whose outputs are scores: what it says at the action token itself, having read it. So the
    value before an action is the score of the token before it."""

    head_bias: bool = True
    """Whether a ``token`` head has a bias. Without one the model is saved as one that classifies sequences, with the
    same scores (``AutoModelForSequenceClassification``)."""

    backend: Mapping[str, Any] = field(default_factory=dict)
    """Options that only the named backend has (``zero_stage`` of deepspeed); an unknown one is refused."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one engine meet."""

    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """A free port at rank 0; not used by a single rank."""

    timeout_s: float = 300.0
    """How long to wait for the others, at the start and in every collective."""


TokenLoss: TypeAlias = Callable[[Any, Mapping[str, Any]], tuple[Any, dict[str, Any]]]
"""``loss(outputs, columns) -> (loss, metrics)``: ``outputs`` ``[tokens]`` at the action tokens of a micro-batch
(log-probs, or scores with ``head: token``), ``columns`` ``[tokens, ...]`` aligned with them. ``loss`` is a scalar
**sum** whose weights (column ``weight``) already carry the global normaliser, as the ``metrics`` do: they add up over
micro-batches and ranks. Rows with the same number in the dense column ``unit`` are in one micro-batch; without that
column the engine adds one that numbers the rows. With ``candidates`` (int64, ragged ``[rows, seq, n]``; causal head)
there are ``candidate_logprobs`` ``[tokens, n]``: of these ids in the token's place. A loss with a true attribute
``wants_entropy`` finds ``entropy``: of the distribution the token was drawn from. Both have gradients."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank."""

    loss: float
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    metrics: dict[str, float] = field(default_factory=dict)


class TrainEngine(Offloadable, Protocol):
    """Holds a rank's part of a model and, unless it is frozen, of its optimizer. All ranks call every method together.

    Made as ``Engine(model, optimizer, settings, rendezvous, memory=None)``: ``model`` is a folder or hub name,
    ``optimizer`` an :class:`OptimizerConfig` or None for a frozen engine, ``memory`` the
    :class:`~dlrover.python.rl.engine.memory.DeviceMemory` that accounts for the device, one of its own if None.

    Batches have the ragged columns ``tokens`` (int64, prompt and completion) and ``action_mask`` (bool, True on the
    tokens that the policy chose; for a causal head never on a row's first token), both ``[rows, seq]``. The ranks of
    one model replica (``layout``) pass the same rows, different replicas different ones.
    """

    version: int
    """Number of the weights: 0 at the start, one more after each :meth:`step`."""

    layout: Layout

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        ...

    def evaluate(self, batch: Batch, temperature: float = 1.0, entropy: bool = False, top: int = 0) -> Batch:
        """Outputs at the action tokens, without gradient, rows in the batch's order.

        Returns:
            ``logprobs`` (or ``scores`` with ``head: token``), and ``entropy`` where asked: ragged float32
            ``[rows, seq]``, 0 outside the action mask. With ``top`` also the so many most likely ids, ``candidates``
            (int64) and ``candidate_logprobs``, ``[rows, seq, top]``; where the batch has ``candidates`` the latter.
        """
        ...

    def step(self, batch: Batch, loss: TokenLoss, temperature: float = 1.0) -> StepResult:
        """One optimizer step on the whole ``batch``; gradients of micro-batches and ranks are summed.

        Raises:
            EngineError: the engine is frozen or offloaded, or no rank has an action token.
            NonFiniteUpdate: the loss or the gradient norm is not finite; nothing has changed on any rank.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Name and whole tensor of everything a Hugging Face checkpoint of the model holds, one after the other.

        Names are Hugging Face's, tied tensors come once under their first name, adapters are merged. The tensors are
        whole on every rank, and valid until the next one is asked for. A collective: every rank must take all of them.
        """
        ...

    def publish(self) -> "WeightSnapshot":
        """The current weights in host memory, stamped with the version and fingerprinted; whole on rank 0."""
        ...

    def receive(self, weights: "WeightSnapshot") -> None:
        """Take over another engine's weights and version (frozen engines only)."""
        ...

    def save(self, path: Path) -> None:
        """Write model and tokenizer in Hugging Face format, whole or not at all."""
        ...

    def save_checkpoint(self, path: Path) -> None:
        """Write model, optimizer, version and random state, each rank its part."""
        ...

    def load_checkpoint(self, path: Path) -> None:
        """Go back to what :meth:`save_checkpoint` wrote: the same bits in the same layout; in another one where the
        backend can, and an :class:`EngineError` where not."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All of this rank that later steps depend on, as a tree of plain values and tensors.

        The tensors are the live ones: copy or write them before the next step.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what :meth:`state_dict` returned on this rank; later steps give the same bits as they did then."""
        ...

    def close(self) -> None:
        """Leave the other ranks and release everything."""
        ...


# -- generating -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn.

    Log-probs that come back are those of ``softmax(logits / temperature)``, which is what a train engine computes at
    the same temperature; at temperature 0 (greedy) they are those of ``softmax(logits)``. With ``top_k`` or ``top_p``
    that is not the distribution sampled from: ``logprobs`` says which of the two is wanted.
    """

    max_new_tokens: Annotated[int, Gt(0)] = 64
    """Tokens at most, the end-of-sequence token included."""

    temperature: Annotated[float, Ge(0.0)] = 1.0
    """Divides the logits; 0 is greedy."""

    samples_per_prompt: Annotated[int, Gt(0)] = 1
    """Completions of each prompt; they come back next to each other."""

    top_k: Annotated[int, Gt(0)] | None = None
    """Draw from the most likely so many tokens only."""

    top_p: Annotated[float, Gt(0.0), Le(1.0)] = 1.0
    """Draw from the fewest most likely tokens that together have this probability."""

    stop: tuple[str, ...] = ()
    """A completion ends once its text holds one of these."""

    keep_stop: bool = False
    """Whether the stop string stays in the completion's *text*. The tokens, which the policy chose, always stay."""

    ignore_eos: bool = False
    """Go on after an end-of-sequence token; for measuring speed."""

    logprobs: Literal["policy", "sampled"] = "policy"
    """``policy``: of ``softmax(logits / temperature)``. ``sampled``: of that distribution cut to ``top_k`` and
    ``top_p`` and normalised again."""


Finish: TypeAlias = Literal["eos", "stop", "length", "aborted"]
"""Why a completion ended: end-of-sequence token, stop string, ``max_new_tokens``, or :meth:`RolloutEngine.abort`."""


@dataclass(frozen=True, eq=False)
class Request:
    """One sample to draw.

    One that was aborted goes on where it stopped: its random numbers belong to positions, so it gets the tokens that
    it would have got.

    Attributes:
        prompt_id: the prompt's number, which the random numbers depend on.
        sample_index: likewise, the sample's among those of its prompt.
        prompt: int64 ``[prompt]``.
        done: int64 ``[done]``: tokens of the completion that were drawn before.
        logprobs: float32 ``[done]``: theirs.
        versions: int64 ``[done]``: the weights that drew each.
    """

    prompt_id: int
    sample_index: int
    prompt: npt.NDArray[np.int64]
    done: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]

    @classmethod
    def fresh(cls, prompt_id: int, sample_index: int, prompt: Any) -> "Request":
        """A sample of which nothing has been drawn."""
        none = np.empty(0, dtype=np.int64)
        tokens = np.asarray(prompt, dtype=np.int64)
        return cls(prompt_id, sample_index, tokens, none, none.astype(np.float32), none)

    @property
    def key(self) -> tuple[int, int]:
        """Names it among the engine's running requests: ``(prompt_id, sample_index)``."""
        return self.prompt_id, self.sample_index


@dataclass(frozen=True, eq=False)
class Completion:
    """A request that has ended: its ``done`` columns are the whole completion, the ``eos`` token included.

    Attributes:
        request: with everything drawn so far; an aborted one can be handed in again.
        finish: why it ended.
        text: the completion without special tokens, cut before the stop string unless that is kept.
    """

    request: Request
    finish: Finish
    text: str


class RolloutEngine(Offloadable, Protocol):
    """Generates completions token in, token out. Made as ``Engine(model, settings, memory=None)``."""

    version: int
    """Number of the weights it serves; -1 before the first :meth:`receive`, and after one that broke off midway."""

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        ...

    def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        """Complete each prompt ``samples_per_prompt`` times.

        Args:
            prompts: columns ``prompt_id`` (int64 ``[rows]``) and ``tokens`` (ragged).
            sampling: how to draw.
            seed: what the random numbers depend on besides the prompt id and the sample's index; so a sample does not
                change with the batch, the order or the number of engines.

        Returns:
            A batch of ``rows * samples_per_prompt`` rows, samples of a prompt adjacent, with ``prompt_id``,
            ``sample_index`` (int64), ``tokens`` (prompt and completion), ``action_mask``, ``logprobs`` (float32, 0 on
            the prompt), ``finished`` (bool: ended by end-of-sequence, which is part of the completion, or by a stop
            string), ``version`` (int64, of the weights that drew the last token), and ``completion`` (texts).
        """
        ...

    def check(self, tokens: Any, sampling: SamplingParams) -> None:
        """Refuse prompts (ragged) that :meth:`generate` would refuse.

        Raises:
            EngineError: one is empty, holds unknown ids or leaves no room; or the backend lacks something asked for.
        """
        ...

    def add(self, requests: Sequence[Request], sampling: SamplingParams, seed: tuple[int, ...]) -> None:
        """Take in samples to draw, beside those that run already; nothing is drawn before :meth:`advance`."""
        ...

    def advance(self) -> list[Completion]:
        """Draw some more of those running requests that there is room for; return those that have ended."""
        ...

    def abort(self, keys: Sequence[tuple[int, int]] | None = None) -> list[Completion]:
        """End these running requests, or all; each comes back as far as it got, with ``finish`` ``"aborted"``."""
        ...

    @property
    def running(self) -> int:
        """Requests taken in that have not ended."""
        ...

    def receive(self, weights: "WeightSnapshot", rewind: bool = False) -> None:
        """Take over new weights; all of them are verified before any is used.

        Running requests go on with them: what they have drawn stays, and their key-value entries are computed anew.

        Args:
            weights: what arrived.
            rewind: take over older ones too, since the run has gone back to an earlier step.

        Raises:
            WeightSyncError: a name, shape or fingerprint differs, or the version is older; the old weights keep
                serving.
        """
        ...

    def close(self) -> None:
        """End what the engine has started and release everything."""
        ...


@dataclass(frozen=True)
class RolloutSettings:
    """How a rollout engine runs, whatever its backend."""

    device: str = "cpu"
    """A torch device."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Of weights and cache."""

    max_batch: Annotated[int, Gt(0)] = 128
    """Most sequences that are decoded at a time."""

    tensor_parallel_size: Annotated[int, Gt(0)] = 1
    """Devices over which the backend splits the model; ``torch`` takes 1 only."""

    gpu_memory_utilization: Annotated[float, Gt(0.0), Le(1.0)] = 0.85
    """Share of a device that weights and key-value cache may fill."""

    backend: Mapping[str, Any] = field(default_factory=dict)
    """Options that only the named backend has; an unknown one is refused."""
