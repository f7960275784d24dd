"""A train engine on megatron-core: tensor and pipeline parallel, for Llama-like models."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError, MissingExtra
from dlrover.python.rl.config.typed import require
from dlrover.python.rl.engine.abilities import optimizer_faults, refuse, train_faults
from dlrover.python.rl.engine.base import Rendezvous
from dlrover.python.rl.engine.layout import Layout
from dlrover.python.rl.engine.megatron.options import MegatronOptions
from dlrover.python.rl.engine.megatron.shape import TransformerShape
from dlrover.python.rl.engine.torch.ranks import Ranks
from dlrover.python.rl.engine.torch.residence import Residence
from dlrover.python.rl.engine.torch.shell import TrainShell

try:
    from megatron.core import parallel_state
except ImportError as error:
    raise MissingExtra("megatron-core", "megatron") from error

from dlrover.python.rl.engine.megatron.backend import MegatronBackend
from dlrover.python.rl.engine.megatron.shards import Stage


class MegatronTrainEngine(TrainShell):
    """Implements :class:`~dlrover.python.rl.engine.base.TrainEngine` on megatron-core.

    ``parallel`` may give tensor and pipeline sizes; the ranks that are left over hold copies of the model, with rows of
    their own. The options of ``backend`` are those of :class:`MegatronOptions`. Megatron's process groups belong to the
    process: engines of one process have equal sizes.

    Raises:
        MissingExtra: megatron-core is not installed (on import).
    """

    def _connect(self, rendezvous: Rendezvous) -> Ranks:
        settings = self._settings
        options = require(MegatronOptions, settings.backend, "backend")
        refuse(train_faults("megatron", settings.parallel, settings.lora is not None, not settings.head_bias))
        if self._config is not None:
            refuse(optimizer_faults("megatron", self._config))
        self.layout = Layout.of(rendezvous.world_size, settings.parallel)
        self._shape = TransformerShape.of(self._blueprint.config, settings.head)
        self._shape.check_split(self.layout.tensor, self.layout.pipeline)
        self._ground = self._choose_ground(options)
        ranks = Ranks.connect(rendezvous, settings.device, always=True)
        with ranks.left_on_failure(), self._ground:
            self._owns_groups = _divide(self.layout, rendezvous.timeout_s)
        self._stage = Stage(
            self.layout,
            self.layout.coordinates(ranks.rank),
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        )
        return ranks

    def _choose_ground(self, options: MegatronOptions) -> AbstractContextManager[Any]:
        if options.cpu_shim:
            from dlrover.python.rl.engine.megatron.cpu_shim import load_shim

            return load_shim()
        if torch.device(self._settings.device).type != "cuda":
            raise EngineError(
                f"megatron-core needs CUDA, and the device is '{self._settings.device}':"
                " the option cpu_shim lets it run there for tests"
            )
        return nullcontext()

    def _make(self, loaded: bool) -> MegatronBackend:
        backend = MegatronBackend(
            self._shape,
            self._config,
            self._settings,
            self._stage,
            self._ranks,
            self._ground,
            Residence(self._owner, self._memory),
        )
        if loaded:
            backend.load(self._blueprint)
        return backend

    def _leave(self) -> None:
        """Leave the other ranks, and Megatron's groups with them."""
        if self._owns_groups:
            parallel_state.destroy_model_parallel()
        super()._leave()


def _divide(layout: Layout, timeout_s: float) -> bool:
    """Make Megatron's process groups, whose collectives end within ``timeout_s``; whether they were made here.

    Raises:
        EngineError: this process has groups of other sizes.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            order="tp-cp-ep-pp-dp",
            distributed_timeout_minutes=timeout_s / 60,  # no whole number is needed
        )
        return True
    there = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if there != (layout.tensor, layout.pipeline):
        raise EngineError(
            f"this process runs megatron with tensor_parallel_size {there[0]} and pipeline_parallel_size {there[1]}"
            f" already, not {layout.tensor} and {layout.pipeline}"
        )
    return False
