# SPDX-License-Identifier: Apache-2.0
"""The part that all train engines share: checks, steps, weights, offload. A backend adds model and optimizer."""

import gc
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch

from dlrover.python.rl.common.errors import EngineError, NonFiniteUpdate
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import OptimizerConfig, Rendezvous, TokenLoss, TrainSettings, UpdateResult
from dlrover.python.rl.engine.api.registry import (
    EngineInfo,
    find_optimizer_errors,
    find_train_errors,
    raise_engine_errors,
    read_options,
)
from dlrover.python.rl.engine.api.settings import Layout
from dlrover.python.rl.engine.api.weights import DeviceKind, Part, WeightSnapshot, take_snapshot, verify_snapshot
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.loading import DTYPES
from dlrover.python.rl.engine.model.packing import (
    MicroBatch,
    check_actions,
    check_requested_outputs,
    check_tokens,
    gather_outputs,
    pack,
)
from dlrover.python.rl.engine.model.ranks import Ranks, resolve_device
from dlrover.python.rl.engine.model.spec import ModelSpec
from dlrover.python.rl.engine.training.adapters import check_adapters, describe_adapters, silenced, take_adapters
from dlrover.python.rl.engine.training.backend import TrainBackend
from dlrover.python.rl.engine.training.stepping import (
    agree_on_micro_batches,
    check_gradient_norm,
    check_loss,
    compute_learning_rate,
    select_metrics,
)

_LOG = get_logger(__name__)


class BackendTrainEngine(ABC):
    """Implements ``BaseTrainEngine`` over a :class:`TrainBackend`, which a subclass builds, again after :meth:`meta`.

    A step sums gradients over micro-batches and ranks, so the result depends neither on the token budget nor on the
    layout (up to float32 rounding); the same layout and inputs give the same bits.

    Raises:
        EngineError: there is no such model, it lacks weights, or it cannot be divided as configured.
        MissingExtra: an optional dependency is absent.
        OutOfDeviceMemory: it does not fit; lists the bytes of every owner.
    """

    name: ClassVar[str]
    info: ClassVar[EngineInfo]
    layout: Layout
    _options: Any = None

    def __init__(
        self,
        model: str | Path | ModelSpec,
        optimizer: OptimizerConfig | None,
        settings: TrainSettings | None = None,
        rendezvous: Rendezvous | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.version = self._skipped = 0  # updates that were skipped in a row
        self.base_version = 0  # of what adapters are added to
        self._unsaved: dict[str, Any] = {}  # of a model that may have to be written again
        self._saves_again = False
        settings = settings or TrainSettings()
        self._settings, self._config = replace(settings, device=resolve_device(settings.device)), optimizer
        self._check_settings()
        if not isinstance(model, ModelSpec):
            model = ModelSpec.of(model, settings.head, settings.head_bias)
        self._spec, lora = model, self._settings.lora
        self._adapters = None if lora is None else describe_adapters(lora, model.fingerprint)
        self._memory = memory or DeviceMemory(self._settings.device)
        self._ranks = self._connect(rendezvous or Rendezvous())
        self._owner = self._memory.owner(f"{'trained' if optimizer else 'frozen'} {self._spec.name}")
        with ExitStack() as on_failure:
            on_failure.callback(self._leave)
            with self._memory.computing(self._owner):
                self._model: TrainBackend | None = self._make(loaded=True)
            on_failure.pop_all()
        self._has_weights = True

    def _check_settings(self) -> None:
        settings, config = self._settings, self._config
        if self.info.options is not None:
            self._options = read_options(self.info.options, settings.backend, f"{self.name}: backend")
        bare_head, options = not settings.head_bias, settings.backend
        errors = find_train_errors(self.name, self.info, settings.parallel, settings.lora, bare_head, options)
        raise_engine_errors(errors)
        if config is not None:
            splits = settings.parallel.tensor_parallel_size
            raise_engine_errors(find_optimizer_errors(self.name, self.info, config, splits))
            compute_learning_rate(config, config.warmup_steps)  # raises if the schedule lacks decay_steps

    @abstractmethod
    def _connect(self, rendezvous: Rendezvous) -> Ranks: ...

    @abstractmethod
    def _make(self, loaded: bool) -> TrainBackend: ...

    @property
    def parameter_count(self) -> int:
        return sum(map(math.prod, self._require_weights("parameter_count").shapes().values()))

    @property
    def tokenizer(self) -> Any:
        return self._spec.tokenizer

    # -- evaluating and training --------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, temperature: float = 1.0, entropy: bool = False, top: int = 0) -> Batch:
        backend, head = self._require_ready("evaluate"), self._settings.head
        check_requested_outputs(batch, head, entropy, top)
        micros = [replace(micro, top=top) for micro in self._pack(batch, backend, needs_actions=False)]
        with torch.no_grad(), self._memory.computing(self._owner):
            outputs = backend.outputs(micros, temperature, entropy)
            return gather_outputs(batch, head, outputs, entropy, top)

    def _pack(self, batch: Batch, backend: TrainBackend, needs_actions: bool) -> list[MicroBatch]:
        settings = self._settings
        budget = settings.max_tokens_per_microbatch if backend.packs else 1

        def check() -> None:
            check_actions(batch, settings.head)
            check_tokens(batch.ragged("tokens"), *backend.limits)

        def cut(at_least: int) -> list[MicroBatch]:
            return pack(batch, budget, settings.head, at_least)

        return agree_on_micro_batches(self._ranks, needs_actions, cut, check)

    def step(self, batch: Batch, loss: TokenLoss, temperature: float = 1.0) -> UpdateResult:
        """See ``BaseTrainEngine``. The loss is called once per micro-batch; numeric columns reach it as ``[action
        tokens]``: ragged ones at their action tokens, dense ones repeated over their row's.
        """
        backend = self._require_ready("step")
        if self._config is None:
            raise EngineError("a frozen engine (no optimizer) cannot take a step")
        if getattr(loss, "wants_entropy", False) and self._settings.head != "causal":
            raise EngineError("the loss wants the entropy, and only a causal head has one")
        micros = self._pack(batch, backend, needs_actions=True)
        totals: dict[str, float] = {}
        try:
            with self._memory.computing(self._owner):
                totals = self._ranks.sum_scalars(backend.add_gradients(micros, batch, loss, temperature))
                value = check_loss(totals, self.version)
                self._memory.hold(self._owner, "gradients", backend.reduce_gradients())
                norm = backend.gradient_norm()
                check_gradient_norm(norm, backend.first_bad_gradient, self.version)
                lr = backend.update(self.version, norm)
        except BaseException as error:
            _drop_gradients(backend, error)
            if isinstance(error, NonFiniteUpdate) and self._skipped < self._config.skip_nonfinite:
                return self._skip(error, totals)
            raise
        backend.drop_gradients()
        self.version, self._skipped = self.version + 1, 0
        return UpdateResult(value, norm, lr, totals)

    def _skip(self, error: NonFiniteUpdate, totals: Mapping[str, float]) -> UpdateResult:
        """Every rank skips: all check the same sums."""
        assert self._config is not None
        self._skipped += 1
        _LOG.warning("skipped, as number %d of %d in a row: %s", self._skipped, self._config.skip_nonfinite, error)
        lr = compute_learning_rate(self._config, self.version)
        return UpdateResult(math.nan, math.nan, lr, select_metrics(totals), skipped=True)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        with silenced(self._require_ready("without_adapters").module):
            yield

    # -- weights ------------------------------------------------------------------------------------------------------

    def named_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        return self._require_weights("named_weights").named_weights(dtype)

    @property
    def adapter_scale(self) -> float | None:
        """See ``AdapterTransport``, as the next three. None for a subclass with weights of its own, and for a head that
        is trained whole: they leave merged."""
        lora = self._settings.lora
        return lora.scale if lora is not None and self._has_own_adapters and self._settings.head == "causal" else None

    @property
    def _has_own_adapters(self) -> bool:
        is_plain = type(self).named_weights is BackendTrainEngine.named_weights
        return self._settings.lora is not None and is_plain

    def named_base_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        return self._require_weights("named_base_weights").named_weights(dtype, merged=False)

    def named_adapters(self) -> Iterator[tuple[str, Any]]:
        return self._require_weights("named_adapters").named_adapters()

    def any_rank(self, flag: bool) -> bool:
        is_whole = self.layout.ddp == self.layout.world_size  # on each rank, which gathers nothing
        return flag if is_whole else any(self._ranks.gather(flag))

    def publish(self) -> WeightSnapshot:
        """Whole on rank 0, without tensors on the others. If each rank has the whole model, rank 0 may call alone."""
        if self._ranks.rank:
            deque(self.named_weights(), maxlen=0)
            return WeightSnapshot(self.version, {}, {}, {}, {})
        return take_snapshot(self.named_weights(), self.version)

    @torch.no_grad()
    def receive(self, weights: WeightSnapshot) -> None:
        if self._config is not None:
            raise EngineError("an engine with an optimizer does not receive weights: only a frozen one does")
        backend = self._revive()
        verify_snapshot(weights, backend.shapes(), self.version if self._has_weights else -1)
        backend.write_weights(weights)
        self.version, self._has_weights = weights.version, True

    def save(self, path: Path) -> None:
        is_writer, adapters = self._ranks.rank == 0, self.named_adapters() if self._has_own_adapters else ()
        tensors = chain(self.named_weights(), adapters)
        copies = ((name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors if is_writer)
        self._unsaved = {name: copy.contiguous() for name, copy in copies}
        with nullcontext() if self._saves_again else self.saving():
            self.save_again(path)

    def save_again(self, path: Path) -> None:
        if self._ranks.rank:
            return
        if not self._unsaved:
            raise EngineError("save_again() repeats a save() inside of saving(), and there was none")
        name, folder = self._spec.name, self._spec.folder
        base = str(folder.resolve()) if folder is not None and Path(name).expanduser().is_dir() else name  # of the hub
        weights, add = take_adapters(self._unsaved, self._settings.lora, base)
        self._spec.save(Path(path), weights, DTYPES.get(self._settings.save_dtype), add)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, what :meth:`save` has gathered stays, for :meth:`save_again`."""
        self._saves_again = True
        try:
            yield
        finally:
            self._saves_again, self._unsaved = False, {}

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Path) -> None:
        self._require_ready("save_checkpoint").write_checkpoint(Path(path), self.version)

    def load_checkpoint(self, path: Path) -> None:
        """See ``BaseTrainEngine``; in another layout later steps are equal within float32 rounding."""
        backend = self._revive()
        if not backend.parked.on_device:
            raise EngineError("the engine is in host memory: call cuda() before loading a checkpoint")
        self.base_version += 1  # also if that fails midway
        self.version = backend.read_checkpoint(Path(path))
        self._has_weights = True

    def state_dict(self) -> dict[str, Any]:
        """``version``, ``skipped``, ``layout``, ``model`` (tied tensors once; with adapters, those alone, and their
        ``lora``) and ``optimizer`` (None if frozen): the live tensors.
        """
        counts = {"version": self.version, "skipped": self._skipped}
        adapted = {"lora": self._adapters} if self._adapters is not None else {}
        return {**counts, **adapted, **self._require_weights("state_dict").local_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy in what :meth:`state_dict` returned on this rank; see :func:`restore_state` for errors."""
        check_adapters(self._adapters, state, self._spec.name, lambda: self._revive().local_state()["model"])
        self._revive().restore_local_state(state)
        self.version, self._skipped, self._has_weights = int(state["version"]), int(state["skipped"]), True

    def load_states(self, states: Iterable[Mapping[str, Any]]) -> None:
        """See ``BaseTrainEngine``; of engines that ``redivide``. Raises EngineError."""
        raise EngineError(f"{self.name} goes on with as many ranks, and in the same layout, only")

    # -- offload ------------------------------------------------------------------------------------------------------

    def cpu(self) -> None:
        if self._model is None:
            raise EngineError("the engine was released by meta(): cuda() or new weights bring it back")
        self._model.parked.to_host()

    def cuda(self, part: Part = "all") -> None:
        """Bring everything to the device; after :meth:`meta`, memory for new weights, which have to follow."""
        if part == "kv_cache":
            raise EngineError("a train engine has no key-value cache")
        if self._model is None:
            self._revive()
        elif not self._model.parked.on_device:
            self._model.parked.to_device()

    def meta(self) -> None:
        if self._model is not None:
            self._model.release()
            self._model.parked.release()
        self._model, self._has_weights = None, False
        gc.collect()
        self._memory.release_cache()

    def place(self) -> DeviceKind:
        if self._model is None:
            return "meta"
        return "cuda" if self._model.parked.on_device else "cpu"

    def footprint(self) -> dict[str, int]:
        return self._memory.bytes_of(self._owner)

    def close(self) -> None:
        self.meta()
        self._leave()

    def _leave(self) -> None:
        self._ranks.close()

    def _revive(self) -> TrainBackend:
        if self._model is None:
            # Adapters are all that changes: the rest of such a model is in its files.
            self._model = self._make(loaded=self._settings.lora is not None)
            self.base_version += 1
        return self._model

    def _require_weights(self, caller: str) -> TrainBackend:
        if self._model is None or not self._has_weights:
            how = "load_state_dict, load_checkpoint" + ("" if self._config else " or receive")
            raise EngineError(f"{caller} needs weights, which were released by meta(): {how} brings new ones")
        return self._model

    def _require_ready(self, caller: str) -> TrainBackend:
        backend = self._require_weights(caller)
        if not backend.parked.on_device:
            raise EngineError(f"{caller} needs its device, and the engine is in host memory: cuda() brings it back")
        return backend


def _drop_gradients(backend: TrainBackend, error: BaseException) -> None:
    try:
        backend.drop_gradients()
    except RuntimeError as another:
        error.add_note(f"Its gradients could not be dropped: {another}")
