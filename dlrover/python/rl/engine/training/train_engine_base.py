# SPDX-License-Identifier: Apache-2.0
"""The base of all train engines: checks, steps, weights, offload. A backend adds model and optimizer."""

import gc
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch

from dlrover.python.rl.common.errors import EngineError, NonFiniteUpdate
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.spans import phase
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
from dlrover.python.rl.engine.api.weights import (
    DOWN,
    UP,
    DeviceKind,
    Part,
    WeightSnapshot,
    take_snapshot,
    verify_snapshot,
)
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model.loading import DTYPES, fingerprint_files
from dlrover.python.rl.engine.model.packing import MicroBatch, check_actions, check_tokens, gather_outputs, pack
from dlrover.python.rl.engine.model.ranks import Ranks, join_rank_errors, resolve_device
from dlrover.python.rl.engine.model.spec import ModelSpec
from dlrover.python.rl.engine.training.adapters import check_adapters, silenced, write_adapters
from dlrover.python.rl.engine.training.backend import TrainBackend, TrainSetup
from dlrover.python.rl.engine.training.stepping import check_loss, compute_learning_rate, refuse_update

_LOG = get_logger(__name__)


class BackendTrainEngine(ABC):
    """Implements ``BaseTrainEngine`` over a :class:`TrainBackend`, which a subclass builds, again after :meth:`meta`.

    A step sums gradients over micro-batches and ranks, so the result depends neither on the token budget nor on the
    layout (up to float32 rounding); the same layout and inputs give the same bits.

    Raises:
        EngineError: the model is missing, lacks weights, or cannot be divided as configured.
        MissingExtra: an optional dependency is not installed.
        OutOfDeviceMemory: the model does not fit; lists the bytes of every owner.
    """

    name: ClassVar[str]
    info: ClassVar[EngineInfo]
    layout: Layout

    def __init__(
        self,
        model: str | Path | ModelSpec,
        optimizer: OptimizerConfig | None,
        settings: TrainSettings | None = None,
        rendezvous: Rendezvous | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.version = self._skipped = 0  # skipped: consecutive updates
        self.base_version = 0  # of the weights below the adapters
        self._unsaved: dict[str, Any] | None = None  # inside saving(): the weights to write
        settings = settings or TrainSettings()
        settings = replace(settings, device=resolve_device(settings.device))
        options = self._check_settings(settings, optimizer)
        spec = model if isinstance(model, ModelSpec) else ModelSpec.of(model, settings.head, settings.head_bias)
        adapters, lora = None, settings.lora
        if lora is not None:
            fingerprint = fingerprint_files(spec.folder) if spec.weights is None else ""
            adapters = {**asdict(lora), "targets": lora.sorted_targets, "model": fingerprint}
        self._setup = TrainSetup(spec, optimizer, settings, options, adapters)
        self._memory = memory or DeviceMemory(settings.device)
        self._setup = replace(self._setup, ranks=self._connect(rendezvous or Rendezvous()))
        self._owner = self._memory.owner(f"{'trained' if optimizer else 'frozen'} {spec.name}")
        with ExitStack() as on_failure:
            on_failure.callback(self._leave_group)
            with self._memory.computing(self._owner):
                self._model: TrainBackend | None = self._make(ParkedTensors(self._owner, self._memory), loaded=True)
            on_failure.pop_all()
        self._has_weights = True

    def _check_settings(self, settings: TrainSettings, config: OptimizerConfig | None) -> Any:
        """Return the options of the backend. Raises an EngineError for settings that the engine does not support."""
        options: Any = None
        if self.info.options is not None:
            options = read_options(self.info.options, settings.backend, f"{self.name}: backend")
        bare_head, sizes = not settings.head_bias, settings.parallel
        raise_engine_errors(find_train_errors(self.name, self.info, sizes, settings.lora, bare_head, settings.backend))
        if config is not None:
            raise_engine_errors(find_optimizer_errors(self.name, self.info, config, sizes.tensor_parallel_size))
            compute_learning_rate(config, config.warmup_steps)  # raises if the schedule lacks decay_steps
        return options

    @abstractmethod
    def _connect(self, rendezvous: Rendezvous) -> Ranks:
        """Join the other ranks, and set ``layout``."""

    @abstractmethod
    def _make(self, parked: ParkedTensors, loaded: bool) -> TrainBackend:
        """Build the model and its optimizer; unless ``loaded``, without values."""

    @property
    def parameter_count(self) -> int:
        return sum(map(math.prod, self._require_weights("parameter_count").shapes().values()))

    @property
    def tokenizer(self) -> Any:
        return self._setup.spec.tokenizer

    # -- evaluating and training --------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, temperature: float = 1.0, entropy: bool = False, top: int = 0) -> Batch:
        backend, head = self._require_ready("evaluate"), self._setup.settings.head
        if (entropy or top) and head != "causal":
            raise EngineError(f"{'entropy' if entropy else 'top'} needs a causal head, not '{head}'")
        if top and "candidates" in batch:
            raise EngineError("use either the batch's 'candidates' or 'top'")
        micros = [replace(micro, top=top) for micro in self._pack(batch, backend, needs_actions=False)]
        with torch.no_grad(), self._memory.computing(self._owner):
            outputs = backend.outputs(micros, temperature, entropy)
            with phase("forward"):  # the outputs are computed one by one
                return gather_outputs(batch, head, outputs, entropy, top)

    def _pack(self, batch: Batch, backend: TrainBackend, needs_actions: bool) -> list[MicroBatch]:
        """Divide this rank's batch into as many micro-batches as every other rank's, so that all work in lockstep; the
        last ones may be empty. If some rank's batch does not fit the model, every rank raises."""
        settings, ranks = self._setup.settings, self._setup.ranks
        budget = settings.max_tokens_per_microbatch if backend.packs else 1
        micros, own_error = [], ""
        try:
            check_actions(batch, settings.head)
            check_tokens(batch.ragged("tokens"), *backend.limits)
            micros = pack(batch, budget, settings.head)
        except EngineError as error:
            own_error = str(error)
        reports = ranks.gather((own_error, len(micros)))
        if message := join_rank_errors([error for error, _ in reports]):
            raise EngineError(message)
        most = max(count for _, count in reports)
        if needs_actions and not most:
            raise EngineError("no row of the batch has an action token")
        return micros if len(micros) == most else pack(batch, budget, settings.head, most)

    def step(self, batch: Batch, loss: TokenLoss, temperature: float = 1.0) -> UpdateResult:
        """See ``BaseTrainEngine``. The loss is called once per micro-batch, with :func:`select_columns`."""
        backend = self._require_ready("step")
        if self._setup.config is None:
            raise EngineError("a frozen engine (no optimizer) cannot take a step")
        if getattr(loss, "wants_entropy", False) and self._setup.settings.head != "causal":
            raise EngineError("the loss wants the entropy, which needs a causal head")
        micros = self._pack(batch, backend, needs_actions=True)
        totals: dict[str, float] = {}
        try:
            with self._memory.computing(self._owner):
                sums = backend.add_gradients(micros, batch, loss, temperature)
                totals = self._setup.ranks.sum_scalars(sums)
                value = check_loss(totals, self.version)
                with phase("reduce gradients"):
                    self._memory.hold(self._owner, "gradients", backend.reduce_gradients())
                    norm = backend.gradient_norm()
                if not math.isfinite(norm):
                    raise refuse_update(f"the gradient norm is {norm}", backend.first_bad_gradient(), self.version)
                with phase("optimizer"):
                    lr = backend.update(self.version, norm)
        except BaseException as error:
            skipped = self._skip(backend, error, totals)
            if skipped is None:
                raise
            return skipped
        backend.drop_gradients()
        self.version, self._skipped = self.version + 1, 0
        return UpdateResult(value, norm, lr, totals)

    def _skip(self, backend: TrainBackend, error: BaseException, totals: Mapping[str, float]) -> UpdateResult | None:
        """Drop the gradients of a failed step. Returns a result if the update is skipped: all ranks check the same
        sums, so all skip it."""
        config = self._setup.config
        try:
            backend.drop_gradients()
        except RuntimeError as another:
            error.add_note(f"Its gradients could not be dropped: {another}")
        if config is None or not isinstance(error, NonFiniteUpdate) or self._skipped >= config.skip_nonfinite:
            return None
        self._skipped += 1
        _LOG.warning("update skipped, %d of at most %d in a row: %s", self._skipped, config.skip_nonfinite, error)
        metrics = {name: value for name, value in totals.items() if not name.startswith("\0")}  # the loss's own
        return UpdateResult(math.nan, math.nan, compute_learning_rate(config, self.version), metrics, skipped=True)

    def without_adapters(self) -> AbstractContextManager[None]:
        return silenced(self._require_ready("without_adapters").module)

    # -- weights ------------------------------------------------------------------------------------------------------

    def named_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        return self._require_weights("named_weights").named_weights(dtype)

    @property
    def adapter_scale(self) -> float | None:
        """See ``AdapterTransport``, which also uses the next three. None if a subclass changes the weights or a head is
        trained whole: these weights are published merged."""
        settings = self._setup.settings
        is_apart = self._has_own_adapters() and settings.head == "causal"
        return settings.lora.scale if settings.lora is not None and is_apart else None

    def _has_own_adapters(self) -> bool:
        is_plain = type(self).named_weights is BackendTrainEngine.named_weights
        return self._setup.settings.lora is not None and is_plain

    def named_base_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        return self._require_weights("named_base_weights").named_weights(dtype, merged=False)

    def named_adapters(self) -> Iterator[tuple[str, Any]]:
        return self._require_weights("named_adapters").named_adapters()

    def any_rank(self, flag: bool) -> bool:
        is_whole = self.layout.ddp == self.layout.world_size  # each rank has the whole model, and gathers nothing
        return flag if is_whole else any(self._setup.ranks.gather(flag))

    def publish(self) -> WeightSnapshot:
        """Return the weights, whole on rank 0 and empty on others. If each rank has the whole model, rank 0 may call
        this alone."""
        if self._setup.ranks.rank:
            deque(self.named_weights(), maxlen=0)
            return WeightSnapshot(self.version, {}, {}, {}, {})
        return take_snapshot(self.named_weights(), self.version)

    @torch.no_grad()
    def receive(self, weights: WeightSnapshot) -> None:
        if self._setup.config is not None:
            raise EngineError("only a frozen engine receives weights, and this one has an optimizer")
        backend = self._revive()
        verify_snapshot(weights, backend.shapes(), self.version if self._has_weights else -1)
        with phase("load weights"):
            backend.write_weights(weights)
        self.version, self._has_weights = weights.version, True

    def save(self, path: Path) -> None:
        tensors = chain(self.named_weights(), self.named_adapters() if self._has_own_adapters() else ())
        with self.saving() if self._unsaved is None else nullcontext():
            self._unsaved = {
                name: tensor.detach().to("cpu", copy=True).contiguous()
                for name, tensor in tensors
                if self._setup.ranks.rank == 0
            }
            self.save_again(path)

    def save_again(self, path: Path) -> None:
        setup = self._setup
        if setup.ranks.rank:
            return
        if not self._unsaved:
            raise EngineError("save_again() repeats a save() inside saving(), but save() was not called")
        adapters = {name: tensor for name, tensor in self._unsaved.items() if name.endswith((DOWN, UP))}
        weights, add = {name: self._unsaved[name] for name in self._unsaved if name not in adapters}, None
        if adapters and setup.settings.lora is not None:
            name, folder = setup.spec.name, setup.spec.folder
            is_local = folder is not None and Path(name).expanduser().is_dir()
            base = str(folder.resolve()) if folder is not None and is_local else name  # of the hub
            add = partial(write_adapters, weights, adapters, setup.settings.lora, base)
        setup.spec.save(Path(path), weights, DTYPES.get(setup.settings.save_dtype), add)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Keep the weights that :meth:`save` gathers, for :meth:`save_again`."""
        self._unsaved = {}
        try:
            yield
        finally:
            self._unsaved = None

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Path) -> None:
        self._require_ready("save_checkpoint").write_checkpoint(Path(path), self.version)

    def load_checkpoint(self, path: Path) -> None:
        """See ``BaseTrainEngine``; in another layout later steps are equal within float32 rounding."""
        backend = self._revive()
        if not backend.parked.on_device:
            raise EngineError("the engine is in host memory: call cuda() before loading a checkpoint")
        self.base_version += 1  # even if reading fails midway
        self.version = backend.read_checkpoint(Path(path))
        self._has_weights = True

    def state_dict(self) -> dict[str, Any]:
        """Return the live tensors of ``model`` (tied ones once; with adapters, these alone, and their ``lora``) and
        ``optimizer`` (None if frozen), ``version``, ``skipped`` and ``layout``."""
        counts = {"version": self.version, "skipped": self._skipped}
        adapted = {"lora": self._setup.adapters} if self._setup.adapters is not None else {}
        return {**counts, **adapted, **self._require_weights("state_dict").local_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's :meth:`state_dict`; see :func:`restore_state` for errors."""
        setup = self._setup
        check_adapters(setup.adapters, state, setup.spec.name, lambda: self._revive().local_state()["model"])
        self._revive().restore_local_state(state)
        self.version, self._skipped, self._has_weights = int(state["version"]), int(state["skipped"]), True

    def load_states(self, states: Iterable[Mapping[str, Any]]) -> None:
        raise EngineError(f"{self.name} can resume only with the same number of ranks, in the same layout")

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
        self._leave_group()

    def _leave_group(self) -> None:
        self._setup.ranks.close()

    def _revive(self) -> TrainBackend:
        if self._model is None:
            # With adapters, only these change: the rest of the model is in its files.
            parked = ParkedTensors(self._owner, self._memory)
            self._model = self._make(parked, loaded=self._setup.settings.lora is not None)
            self.base_version += 1
        return self._model

    def _require_weights(self, caller: str) -> TrainBackend:
        if self._model is None or not self._has_weights:
            how = "load_state_dict, load_checkpoint" + ("" if self._setup.config else " or receive")
            raise EngineError(f"{caller} needs weights, which meta() released: {how} brings new ones")
        return self._model

    def _require_ready(self, caller: str) -> TrainBackend:
        backend = self._require_weights(caller)
        if not backend.parked.on_device:
            raise EngineError(f"{caller} needs the device, but the engine is in host memory: call cuda() first")
        return backend
