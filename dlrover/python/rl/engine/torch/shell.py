"""What all train engines are outside of their backends: refusals, steps, weights on their way, places.

An engine holds a :class:`~dlrover.python.rl.engine.torch.backend.TrainBackend` while it has tensors, and makes another
when it is to have some again.
"""

import gc
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.base import OptimizerConfig, Rendezvous, StepResult, TokenLoss, TrainSettings
from dlrover.python.rl.engine.layout import Layout
from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.engine.offload import Part, Place
from dlrover.python.rl.engine.torch.backend import TrainBackend
from dlrover.python.rl.engine.torch.blueprint import Blueprint
from dlrover.python.rl.engine.torch.evaluation import check_asked, gathered
from dlrover.python.rl.engine.torch.packing import MicroBatch, check_actions, check_tokens, pack
from dlrover.python.rl.engine.torch.ranks import Ranks, numbered
from dlrover.python.rl.engine.torch.stepping import agreed_micro_batches, check_norm, learning_rate, settle
from dlrover.python.rl.engine.weights import WeightSnapshot, take_snapshot, verify


class TrainShell(ABC):
    """A train engine but for its backend, which a subclass makes.

    A step sums the loss's gradients over micro-batches and ranks, so the result depends neither on the token budget
    nor on the layout (up to float32 rounding); the same layout and inputs give the same bits.

    Args:
        model: folder or hub name, or a blueprint.
        optimizer: how to train it; None makes a frozen engine, which only evaluates.
        settings: how it runs.
        rendezvous: where its ranks meet.
        memory: accounts for the device; one of its own if None.

    Raises:
        EngineError: there is no such model, it lacks weights, or it cannot be divided as asked (gives the numbers).
        MissingExtra: something that is asked for is not installed.
        OutOfDeviceMemory: it does not fit; names who holds what.
    """

    def __init__(
        self,
        model: str | Path | Blueprint,
        optimizer: OptimizerConfig | None,
        settings: TrainSettings | None = None,
        rendezvous: Rendezvous | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.version = 0
        settings = settings or TrainSettings()
        self._settings, self._config = replace(settings, device=numbered(settings.device)), optimizer
        if not isinstance(model, Blueprint):
            model = Blueprint.of(model, settings.head, settings.head_bias)
        self._blueprint = model
        if optimizer is not None:
            learning_rate(
                optimizer, optimizer.warmup_steps
            )  # raises where nobody has said over how many steps it falls
        self._memory = memory or DeviceMemory(self._settings.device)
        self._ranks = self._connect(rendezvous or Rendezvous())
        self._owner = self._memory.owner(f"{'trained' if optimizer else 'frozen'} {self._blueprint.name}")
        with ExitStack() as failing:
            failing.callback(self._leave)
            with self._memory.computing(self._owner):
                self._model: TrainBackend | None = self._make(loaded=True)
            failing.pop_all()
        self._has_weights = True

    @abstractmethod
    def _connect(self, rendezvous: Rendezvous) -> Ranks:
        """Check the settings and meet the other ranks; sets :attr:`layout`."""

    @abstractmethod
    def _make(self, loaded: bool) -> TrainBackend:
        """The backend, with the blueprint's weights or with room for others."""

    layout: Layout
    """How the ranks divide the model and its batch."""

    @property
    def parameter_count(self) -> int:
        """Numbers in the whole model's weights, tied ones once."""
        return sum(map(math.prod, self._holding("parameter_count").shapes().values()))

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._blueprint.tokenizer

    # -- evaluating and training --------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, temperature: float = 1.0, entropy: bool = False, top: int = 0) -> Batch:
        """Return ``logprobs`` (``scores``), and ``entropy`` where asked: ragged float32 ``[rows, seq]``, 0 outside the
        action mask, rows in the batch's order. Of the ``top`` most likely ids ``candidates`` and
        ``candidate_logprobs``, ``[rows, seq, top]``; of the batch's own ``candidates`` the latter.

        Raises:
            EngineError: tokens, lengths or the action mask do not fit the model; or it is offloaded.
            OutOfDeviceMemory: there is no room for what has to be computed.
        """
        backend, head = self._ready("evaluate"), self._settings.head
        check_asked(batch, head, entropy, top)
        micros = [replace(micro, top=top) for micro in self._micro_batches(batch, backend, needs_actions=False)]
        with torch.no_grad(), self._memory.computing(self._owner):
            found = backend.outputs(micros, temperature, entropy)
            return gathered(batch, head, found, entropy, top)

    def _micro_batches(self, batch: Batch, backend: TrainBackend, needs_actions: bool) -> list[MicroBatch]:
        settings = self._settings
        budget = settings.max_tokens_per_microbatch if backend.packs else 1

        def check() -> None:
            check_actions(batch, settings.head)
            check_tokens(batch.ragged("tokens"), *backend.limits)

        def cut(at_least: int) -> list[MicroBatch]:
            return pack(batch, budget, settings.head, at_least)

        return agreed_micro_batches(self._ranks, needs_actions, cut, check)

    def step(self, batch: Batch, loss: TokenLoss, temperature: float = 1.0) -> StepResult:
        """One optimizer step on the whole ``batch``, and on those of the other replicas.

        Args:
            batch: this replica's rows; numeric columns reach the loss as ``[action tokens]``: ragged ones at their
                action tokens, dense ones spread over their row's.
            loss: called once per micro-batch.
            temperature: of the log-probs handed to the loss; the one the batch was sampled at.

        Raises:
            EngineError: the engine is frozen or offloaded, or no rank has an action token.
            NonFiniteUpdate: the loss or the gradient norm is not finite. The weights, the optimizer and the version are
                then what they were, on every rank.
            OutOfDeviceMemory: there is no room for what has to be computed; names who holds what.
        """
        backend = self._ready("step")
        if self._config is None:
            raise EngineError("a frozen engine (no optimizer) cannot take a step")
        if getattr(loss, "wants_entropy", False) and self._settings.head != "causal":
            raise EngineError("the loss wants the entropy, which scores have not: only a causal head draws tokens")
        micros = self._micro_batches(batch, backend, needs_actions=True)
        try:
            with self._memory.computing(self._owner):
                totals = self._ranks.sum_scalars(backend.add_gradients(micros, batch, loss, temperature))
                value = settle(totals, self.version)
                self._memory.hold(self._owner, "gradients", backend.reduce_gradients())
                norm = backend.gradient_norm()
                check_norm(norm, backend.first_bad_gradient, self.version)
                lr = backend.update(self.version, norm)
        except BaseException as error:
            _drop_gradients(backend, error)
            raise
        backend.drop_gradients()
        self.version += 1
        return StepResult(value, norm, lr, totals)

    # -- weights ------------------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Name and whole tensor of everything a Hugging Face checkpoint of the model holds, one after the other.

        A collective where ranks divide the model. An offloaded model's come from host memory, a tensor at a time.
        """
        return self._holding("named_weights").named_weights()

    def publish(self) -> WeightSnapshot:
        """The current weights in host memory, stamped with the version and fingerprinted: whole on rank 0, without
        tensors on the others.

        A collective where ranks divide the model; where each has all of it, rank 0 may call alone.
        """
        if self._ranks.rank:
            for _ in self.named_weights():
                pass
            return WeightSnapshot(self.version, {}, {}, {}, {})
        return take_snapshot(self.named_weights(), self.version)

    @torch.no_grad()
    def receive(self, weights: WeightSnapshot) -> None:
        """Take over another engine's weights and version, as a reference that follows its actor does.

        Raises:
            EngineError: this engine trains; its weights change by its own steps only.
            WeightSyncError: the weights do not fit, are corrupt or older; nothing was changed.
        """
        if self._config is not None:
            raise EngineError("an engine with an optimizer does not take over weights: only a frozen one does")
        backend = self._revived()
        verify(weights, backend.shapes(), self.version if self._has_weights else -1)
        backend.write_weights(weights)
        self.version, self._has_weights = weights.version, True

    def save(self, path: Path) -> None:
        """Write model and tokenizer in Hugging Face format, whole or not at all; rank 0 writes.

        A collective where ranks divide the model.
        """
        first = self._ranks.rank == 0
        tensors = {}
        for name, tensor in self.named_weights():
            if first:
                tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if first:
            self._blueprint.save(Path(path), tensors)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Path) -> None:
        """Write model, optimizer, version and random state, each rank its part."""
        self._ready("save_checkpoint").write_checkpoint(Path(path), self.version)

    def load_checkpoint(self, path: Path) -> None:
        """Go back to what :meth:`save_checkpoint` wrote: the same bits in the same layout, and within float32 rounding
        of later steps in another one, where the backend can read it there.

        Raises:
            EngineError: there is no checkpoint, or it is of another model or of a layout that this one cannot read; or
                the engine is offloaded.
        """
        backend = self._revived()
        if not backend.residence.on_device:
            raise EngineError("the engine is in host memory: cuda() brings it back, and then it can load a checkpoint")
        self.version = backend.read_checkpoint(Path(path))
        self._has_weights = True

    def state_dict(self) -> dict[str, Any]:
        """What later steps of this rank depend on, bit for bit: ``version``, ``layout``, ``model`` (its parts of the
        tensors, tied ones once; with adapters, those alone) and ``optimizer``.

        ``optimizer`` holds AdamW's moments; None in a frozen engine. Rates and decays are not in it: they follow from
        the configuration and the version. The tensors are the live ones: copy or write them before the next step.
        """
        return {"version": self.version, **self._holding("state_dict").local_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what :meth:`state_dict` returned on this rank; the tensors are copied.

        Raises:
            WeightSyncError: the state is of another model; nothing was changed.
            EngineError: it is of another layout, or exactly one of state and engine has an optimizer; nothing was
                changed.
        """
        self._revived().restore_local_state(state)
        self.version, self._has_weights = int(state["version"]), True

    # -- places -------------------------------------------------------------------------------------------------------

    def cpu(self) -> None:
        """Move weights and optimizer to host memory and free the device's."""
        if self._model is None:
            raise EngineError("the engine was released by meta(): cuda() or new weights bring it back")
        self._model.residence.to_host()

    def cuda(self, part: Part = "all") -> None:
        """Bring everything to the device. After :meth:`meta` that is room for new weights, which have to follow.

        Raises:
            EngineError: ``part`` is the key-value cache, which a train engine has not.
            OutOfDeviceMemory: it does not fit; names who holds what.
        """
        if part == "kv_cache":
            raise EngineError("a train engine has no key-value cache")
        if self._model is None:
            self._revived()
        elif not self._model.residence.on_device:
            self._model.residence.to_device()

    def meta(self) -> None:
        """Release all tensors on host and device; new weights bring the engine back."""
        if self._model is not None:
            self._model.release()
            self._model.residence.release()
        self._model, self._has_weights = None, False
        gc.collect()
        if torch.device(self._settings.device).type == "cuda":
            torch.cuda.empty_cache()

    def place(self) -> Place:
        """Where the weights are."""
        if self._model is None:
            return "meta"
        return "cuda" if self._model.residence.on_device else "cpu"

    def footprint(self) -> dict[str, int]:
        """Bytes on the device by kind; 0s left out."""
        return self._memory.held(self._owner)

    def close(self) -> None:
        """Leave the other ranks and release everything."""
        self.meta()
        self._leave()

    def _leave(self) -> None:
        """Leave the other ranks; nothing stays behind that keeps another engine from meeting them."""
        self._ranks.close()

    def _revived(self) -> TrainBackend:
        """The backend, with room for weights where it has been released."""
        if self._model is None:
            # Adapters are all that changes: the rest of such a model is in its files.
            self._model = self._make(loaded=self._settings.lora is not None)
        return self._model

    def _holding(self, what: str) -> TrainBackend:
        if self._model is None or not self._has_weights:
            how = "load_state_dict, load_checkpoint" + ("" if self._config else " or receive")
            raise EngineError(f"{what} needs weights, which were released by meta(): {how} brings new ones")
        return self._model

    def _ready(self, what: str) -> TrainBackend:
        backend = self._holding(what)
        if not backend.residence.on_device:
            raise EngineError(f"{what} needs the engine on its device, and it is in host memory: cuda() brings it back")
        return backend


def _drop_gradients(backend: TrainBackend, error: BaseException) -> None:
    """After a step that failed; where that fails too, since ranks are gone, the step's own error is the one to know."""
    try:
        backend.drop_gradients()
    except RuntimeError as another:
        error.add_note(f"Its gradients could not be dropped: {another}")
