"""The ports of this room: what a train engine, a rollout engine and a weight transport can be asked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeAlias

from annotated_types import Ge, Gt

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.weights import WeightSnapshot


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn.

    Log-probs that come back are those of the distribution sampled from, ``softmax(logits / temperature)``; at
    temperature 0 (greedy) they are those of ``softmax(logits)``. Truncation (top-k, top-p) is not offered: it would
    make them log-probs of another distribution.
    """

    max_new_tokens: Annotated[int, Gt(0)] = 64
    """Tokens at most, the end-of-sequence token included."""

    temperature: Annotated[float, Ge(0.0)] = 1.0
    """Divides the logits; 0 is greedy."""

    samples_per_prompt: Annotated[int, Gt(0)] = 1
    """Completions of each prompt; they come back next to each other."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and gradient-norm clipping."""

    lr: Annotated[float, Gt(0.0)] = 1e-6
    """Peak learning rate."""

    warmup_steps: Annotated[int, Ge(0)] = 0
    """Optimizer steps over which the rate rises linearly from ``lr / warmup_steps`` to ``lr``."""

    weight_decay: Annotated[float, Ge(0.0)] = 0.0
    """Decoupled weight decay, not applied to vectors (norms, biases)."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""

    max_grad_norm: Annotated[float, Gt(0.0)] | None = 1.0
    """Global gradient norm to clip to; None turns clipping off."""


TokenLoss: TypeAlias = Callable[[Any, Mapping[str, Any]], tuple[Any, dict[str, Any]]]
"""``loss(logprobs, columns) -> (loss, metrics)``: ``logprobs`` ``[tokens]`` of the action tokens of a micro-batch, each
of ``columns`` ``[tokens]`` aligned with them. ``loss`` is a scalar **sum** whose per-token weights (column ``weight``)
already carry the global normaliser, and so are the ``metrics``: they add up over micro-batches and ranks."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    metrics: dict[str, float] = field(default_factory=dict)


class TrainEngine(Protocol):
    """Holds a model and, unless it is frozen, its optimizer.

    Batches have the ragged columns ``tokens`` (int64, prompt and completion) and ``action_mask`` (bool, True on the
    tokens that the policy chose; never on a row's first token), both ``[rows, seq]``.
    """

    version: int
    """Number of the weights: 0 at the start, one more after each :meth:`step`."""

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Batch:
        """Return ``logprobs``: ragged float32 ``[rows, seq]``, 0 outside the action mask. No gradient."""
        ...

    def step(self, batch: Batch, loss: TokenLoss, temperature: float = 1.0) -> StepResult:
        """One optimizer step on the whole ``batch``; gradients of micro-batches and ranks are summed."""
        ...

    def publish(self) -> WeightSnapshot:
        """The current weights, stamped with the version and fingerprinted."""
        ...

    def save(self, path: Path) -> None:
        """Write model and tokenizer in Hugging Face format."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that later steps depend on, as a tree of plain values and tensors.

        The tensors are the live ones: copy or write them before the next step.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what :meth:`state_dict` returned; later steps give the same bits as they did then."""
        ...


class RolloutEngine(Protocol):
    """Generates completions token in, token out."""

    version: int
    """Number of the weights it serves; -1 before the first :meth:`receive`, and after one that broke off midway."""

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
            the prompt), ``finished`` (bool: ended by end-of-sequence, which is part of the completion), and
            ``version`` (int64).
        """
        ...

    def receive(self, weights: WeightSnapshot, rewind: bool = False) -> None:
        """Take over new weights; all of them are verified before any is used.

        Args:
            weights: what arrived.
            rewind: take over older ones too, since the run has gone back to an earlier step.

        Raises:
            WeightSyncError: a name, shape or fingerprint differs, or the version is older; the old weights keep
                serving.
        """
        ...
