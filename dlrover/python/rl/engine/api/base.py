# SPDX-License-Identifier: Apache-2.0
"""Interfaces of train engines and rollout engines."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Le, Lt

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.settings import Layout, ParallelSizes
from dlrover.python.rl.engine.api.settings import OptimizerConfig as OptimizerConfig  # part of this interface
from dlrover.python.rl.engine.api.weights import Offloadable, WeightSnapshot


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters instead of full training. A job needs no role REFERENCE: the actor without adapters is the
    reference. Rollouts receive the model once, and later only the adapters, which they add. Saved weights are merged;
    the folder ``adapter`` in a saved model has the adapters in PEFT's format."""

    rank: Annotated[int, Gt(0)] = 16
    """Rank of the adapters."""

    alpha: Annotated[float, Gt(0.0), Lt(math.inf)] = 32.0
    """Scale: the adapters' product is multiplied by ``alpha / rank``."""

    targets: tuple[str, ...] | Literal["all-linear"] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    )  # fmt: skip
    """Last parts of the names of the linear layers that get adapters; ``all-linear``: all except the output layer."""

    quantize_base: Literal["nf4"] | None = None
    """``nf4``: the matrices of all linear layers except the output layer are in 4 bits (QLoRA, arXiv:2305.14314), with
    the extra ``bitsandbytes``. Published weights are dequantized. None: the whole model is in ``precision``."""

    @property
    def sorted_targets(self) -> list[str] | str:
        """The targets in an order that does not depend on the configuration's."""
        return self.targets if isinstance(self.targets, str) else sorted(set(self.targets))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class TrainSettings:
    device: str = "cpu"
    """A torch device."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the forward and backward pass. Master weights, optimizer and gradient reduction are always
    float32."""

    max_tokens_per_microbatch: Annotated[int, Gt(0)] = 16384
    """Maximum tokens of one forward pass; a longer row is a micro-batch by itself."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    parallel: ParallelSizes = ParallelSizes()
    """The division of the model among the ranks."""

    lora: LoraSettings | None = None
    """Train adapters only."""

    save_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Data type of the weights of saved models; ``auto``: the model's files' type. Checkpoints are float32."""

    head: Literal["causal", "token"] = "causal"
    """``causal``: a language model; outputs are log-probs. ``token``: a token-classification model with one label
    (critic, reward model); outputs are the scores at the action tokens, so the value before an action is the score of
    the token before it."""

    head_bias: bool = True
    """A ``token`` head has a bias. Without one the model is saved as ``AutoModelForSequenceClassification``, with the
    same scores."""

    backend: Mapping[str, Any] = field(default_factory=dict)
    """Options of the backend (``zero_stage`` of deepspeed); an unknown one is refused."""

    mask_unknown_ids: bool = True
    """Give probability 0 to the ids that pad the embedding, which the tokenizer does not have. Rollouts must have the
    same setting."""


@dataclass(frozen=True)
class Rendezvous:
    """The address where the ranks of one engine meet."""

    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """A free port on rank 0's node; not used by a single rank."""

    timeout_s: float = 300.0
    """Longest wait for the other ranks, at the start and in every collective."""


TokenLoss: TypeAlias = Callable[[Any, Mapping[str, Any]], tuple[Any, dict[str, Any]]]
"""``loss(outputs, columns) -> (loss, metrics)``: ``outputs`` ``[tokens]`` at the action tokens of a micro-batch
(log-probs, or scores with ``head: token``), ``columns`` ``[tokens, ...]`` aligned with them. ``loss`` is a scalar
**sum**; its weights (column ``weight``) already include the global normaliser. So do the ``metrics``: both add up over
micro-batches and ranks. Rows with the same number in the dense column ``unit`` are in one micro-batch; without that
column the engine adds one that numbers the rows. ``candidates`` (int64, ragged ``[rows, seq, n]``; causal head) adds
``candidate_logprobs`` ``[tokens, n]``. A loss whose attribute ``wants_entropy`` is true gets the column ``entropy``, of
the distribution that the token was sampled from. Gradients flow through ``candidate_logprobs`` and ``entropy``."""


@dataclass(frozen=True)
class UpdateResult:
    """The result of a step, the same on every rank."""

    loss: float
    grad_norm: float  #: of the whole gradient, before clipping
    lr: float
    metrics: dict[str, float] = field(default_factory=dict)
    skipped: bool = False  #: the update was not finite, and nothing has changed


class BaseTrainEngine(Offloadable, Protocol):
    """A rank's part of a model and, unless it is frozen, of its optimizer. All ranks call every method together.

    Constructed as ``Engine(model, optimizer, settings, rendezvous, memory=None)``: ``model`` is a folder or hub name,
    ``optimizer`` None for a frozen engine, ``memory`` the ``DeviceMemory`` that accounts for the device.

    Batches have the ragged columns ``tokens`` (int64) and ``action_mask`` (bool, never on a row's first token for a
    causal head), both ``[rows, seq]``. The ranks of a model replica (``layout``) pass the same rows."""

    version: int
    """Version of the weights: 0 at the start, one more after each :meth:`step` that is not skipped."""

    layout: Layout

    @property
    def tokenizer(self) -> Any: ...

    def evaluate(self, batch: Batch, temperature: float = 1.0, entropy: bool = False, top: int = 0) -> Batch:
        """Return the outputs at the action tokens, without gradient: ``logprobs`` (``scores`` with ``head: token``),
        and if requested ``entropy``, ragged float32 ``[rows, seq]``, 0 outside the action mask, in the batch's order.

        ``top`` adds the most likely ids ``candidates`` (int64) and ``candidate_logprobs``, ``[rows, seq, top]``; a
        batch with ``candidates`` gets only the latter."""

    def step(self, batch: Batch, loss: TokenLoss, temperature: float = 1.0) -> UpdateResult:
        """Take one optimizer step; gradients of micro-batches and ranks are summed.

        Raises:
            EngineError: the engine is frozen or offloaded, or no rank has an action token.
            NonFiniteUpdate: the loss or the gradient norm is not finite, after ``skip_nonfinite`` skipped updates;
                nothing has changed on any rank.
        """

    def without_adapters(self) -> AbstractContextManager[None]:
        """Let :meth:`evaluate` run the model without adapters, if the engine trains adapters."""

    def named_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        """Yield Hugging Face's name and the whole tensor of each weight; tied ones once, adapters merged. Each rank
        casts its part of a parameter to the torch ``dtype``, if it is given, before they are gathered.

        A collective: every rank must consume the whole iterator. A tensor does not change until the iterator ends,
        since a device may still be copying it."""

    def publish(self) -> WeightSnapshot:
        """Return the current weights in host memory, whole on rank 0."""

    def receive(self, weights: WeightSnapshot) -> None:
        """Adopt another engine's weights and version (frozen engines only)."""

    def save(self, path: Path) -> None:
        """Write model and tokenizer in Hugging Face format, atomically."""

    def save_again(self, path: Path) -> None:
        """Repeat :meth:`save` after it has failed on this rank, for example with no space left; other ranks do not
        take part."""
        self.save(path)

    def save_checkpoint(self, path: Path) -> None:
        """Write model, optimizer, version and random state; each rank writes its part."""

    def load_checkpoint(self, path: Path) -> None:
        """Restore :meth:`save_checkpoint`: bit for bit in the same layout; in other layouts only if the backend can."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank that later steps need. The tensors are live: copy them before the next step."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; later steps give the same bits. Raises OtherLayout."""

    def load_states(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Copy this rank's part out of the :meth:`state_dict` of all ranks of another layout. Each state is used until
        the next one is requested; the ranks exchange nothing."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class SamplingParams:
    """Settings of sampling. ``logprobs`` are of ``softmax(logits / temperature)``, as a train engine computes them
    (at temperature 0: of ``softmax(logits)``); with ``top_k`` or ``top_p`` the sampled distribution differs."""

    max_new_tokens: Annotated[int, Gt(0)] = 64
    """Maximum tokens of a completion, the end-of-sequence token included."""

    temperature: Annotated[float, Ge(0.0), Lt(math.inf)] = 1.0
    """Divides the logits; 0 is greedy."""

    samples_per_prompt: Annotated[int, Gt(0)] = 1
    """Completions of each prompt."""

    top_k: Annotated[int, Gt(0)] | None = None
    """Sample from this many most likely tokens only."""

    top_p: Annotated[float, Gt(0.0), Le(1.0)] = 1.0
    """Sample from the smallest set of most likely tokens with at least this total probability."""

    stop: tuple[str, ...] = ()
    """A completion ends once its text contains one of these."""

    keep_stop: bool = False
    """Keep the stop string in the completion's *text*. Its tokens always stay."""

    ignore_eos: bool = False
    """Continue after an end-of-sequence token; for benchmarks."""

    logprobs: Literal["policy", "sampled"] = "policy"
    """The distribution of the log-probs. ``policy``: ``softmax(logits / temperature)``. ``sampled``: the same, cut to
    ``top_k`` and ``top_p`` and renormalised."""


Finish: TypeAlias = Literal["eos", "stop", "length", "aborted"]
"""The cause of a completion's end: the end-of-sequence token, a stop string, ``max_new_tokens``, or
:meth:`BaseRolloutEngine.abort`."""


@dataclass(frozen=True, eq=False)
class Request:
    """One sample to generate. If it is aborted and added again, it gets the same tokens as without the abort, because
    random numbers depend only on ``prompt_id``, ``sample_index`` and the position."""

    prompt_id: int
    sample_index: int  #: among the samples of its prompt
    prompt: npt.NDArray[np.int64]  #: [prompt]
    done: npt.NDArray[np.int64]  #: [done]: tokens generated before
    logprobs: npt.NDArray[np.float32]  #: [done]
    versions: npt.NDArray[np.int64]  #: [done]: versions of the weights that generated each token
    more: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Columns that the engine declares by ``EngineInfo.columns``: ``[done, ...]`` per token, or a value per sample."""

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """All columns of the tokens ``done``."""
        return {"logprobs": self.logprobs, "versions": self.versions, **self.more}

    @classmethod
    def fresh(cls, prompt_id: int, sample_index: int, prompt: Any) -> "Request":
        empty, tokens = np.empty(0, dtype=np.int64), np.asarray(prompt, dtype=np.int64)
        return cls(prompt_id, sample_index, tokens, empty, empty.astype(np.float32), empty)

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt_id, self.sample_index


@dataclass(frozen=True, eq=False)
class Completion:
    request: Request  #: ``done`` is the whole completion, with the end-of-sequence token
    finish: Finish
    text: str  #: without special tokens, cut before the stop string unless that is kept

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """All columns of the completion's tokens."""
        return self.request.columns


class BaseRolloutEngine(Offloadable, Protocol):
    """Generates completions, token in, token out. Constructed as ``Engine(model, settings, memory=None)``."""

    version: int
    """Version of the weights in use; -1 before the first :meth:`receive`, and after one that failed midway."""

    @property
    def tokenizer(self) -> Any: ...

    def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        """Complete each prompt (``prompt_id`` int64 ``[rows]``, ``tokens`` ragged) ``samples_per_prompt`` times.

        A sample depends on ``seed``, its prompt id and its index only, not on its batch. Returns ``rows *
        samples_per_prompt`` rows, a prompt's samples adjacent: ``prompt_id``, ``sample_index`` (int64), ``tokens``
        (prompt and completion), ``action_mask``, ``logprobs`` (float32, 0 on the prompt), ``finished`` (bool: by
        end-of-sequence or a stop string), ``version`` (of the last token's weights), ``completion`` (text), and the
        columns that the engine declares."""

    def check(self, tokens: Any, sampling: SamplingParams) -> None:
        """Raise an ``EngineError`` if :meth:`generate` would refuse these prompts (ragged)."""

    def add(self, requests: Sequence[Request], sampling: SamplingParams, seed: tuple[int, ...]) -> None:
        """Add requests to those that run already; :meth:`advance` generates."""

    def advance(self) -> list[Completion]:
        """Generate some more tokens of the running requests that fit; return those that have ended."""

    def abort(self, keys: Sequence[tuple[int, int]] | None = None) -> list[Completion]:
        """End these running requests, or all; each comes back as a partial completion."""

    @property
    def running(self) -> int:
        """Number of requests that have not ended."""

    def receive(self, weights: WeightSnapshot, rewind: bool = False) -> None:
        """Adopt new weights after verifying all of them; older ones only with ``rewind``, after the run has gone back.

        Running requests continue with them; caches are recomputed.

        Raises:
            WeightSyncError: a name, shape, fingerprint or version does not fit; the old weights keep serving.
        """

    def close(self) -> None: ...


@dataclass(frozen=True)
class RolloutSettings:
    device: str = "cpu"
    """A torch device."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of weights and cache."""

    max_batch: Annotated[int, Gt(0)] = 128
    """Maximum sequences that are decoded at a time."""

    tensor_parallel_size: Annotated[int, Gt(0)] = 1
    """Devices over which the backend splits the model; 1 for ``torch``."""

    gpu_memory_utilization: Annotated[float, Gt(0.0), Le(1.0)] = 0.85
    """Share of a device that weights and key-value cache may use."""

    backend: Mapping[str, Any] = field(default_factory=dict)
    """Options of the backend; an unknown one is refused."""

    devices: tuple[int, ...] = ()
    """CUDA devices of the backend, as this process numbers them; empty: ``device`` and those after it."""

    mask_unknown_ids: bool = True
    """Never sample ids that the tokenizer does not have, if the backend can mask them (``masks_unknown_ids`` of its
    ``EngineInfo``). The train engine must compute log-probs with the same setting."""
