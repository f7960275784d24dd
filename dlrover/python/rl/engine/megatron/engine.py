# SPDX-License-Identifier: Apache-2.0
"""The train engine on megatron-core: its process groups and its backend."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError, MissingExtra
from dlrover.python.rl.engine.api.base import Rendezvous
from dlrover.python.rl.engine.api.settings import Layout
from dlrover.python.rl.engine.megatron import INFO
from dlrover.python.rl.engine.megatron.conversion import TransformerShape
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.training.train_engine_base import BackendTrainEngine

try:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
except ImportError as error:
    raise MissingExtra("megatron-core", "megatron") from error

from dlrover.python.rl.engine.megatron.backend import MegatronBackend
from dlrover.python.rl.engine.megatron.shards import Stage


class MegatronTrainEngine(BackendTrainEngine):
    """``parallel`` gives tensor and pipeline sizes; the remaining ranks hold copies of the model, with different rows,
    and divide its optimizer (ZeRO-1).

    Megatron's process groups belong to the process: engines of one process have equal sizes.

    Raises:
        MissingExtra: megatron-core is not installed (on import).
    """

    name, info = "megatron", INFO

    def _connect(self, rendezvous: Rendezvous) -> Ranks:
        settings = self._settings
        self.layout = Layout.of(rendezvous.world_size, settings.parallel)
        self._shape = TransformerShape.of(self._spec.config, settings.head)
        if (known_ids := self._spec.known_ids(self._shape.vocab, settings.mask_unknown_ids)) is not None:
            self._shape = replace(self._shape, known_ids=known_ids)
        self._shape.check_split(self.layout.tensor, self.layout.pipeline)
        self._context = self._choose_context()
        ranks = Ranks.connect(rendezvous, settings.device, always=True)
        with ranks.close_on_failure(), self._context:
            self._owns_groups = _divide(self.layout, rendezvous.timeout_s)
        self._stage = Stage(
            self.layout,
            self.layout.coordinates(ranks.rank),
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_data_parallel_group(),
        )
        return ranks

    def _choose_context(self) -> AbstractContextManager[Any]:
        if self._options.cpu_shim:
            from dlrover.python.rl.engine.megatron.cpu_shim import load_shim

            return load_shim()
        if torch.device(self._settings.device).type != "cuda":
            raise EngineError(
                f"megatron-core needs CUDA, and the device is '{self._settings.device}':"
                " the option cpu_shim lets it run there for tests"
            )
        return nullcontext()

    def _make(self, loaded: bool) -> MegatronBackend:
        parked = ParkedTensors(self._owner, self._memory)
        backend = MegatronBackend(
            self._shape, self._config, self._settings, self._stage, self._ranks, self._context, parked
        )
        if loaded:
            backend.load(self._spec)
        return backend

    def _leave(self) -> None:
        if self._owns_groups:
            parallel_state.destroy_model_parallel()
        super()._leave()


def _divide(layout: Layout, timeout_s: float) -> bool:
    """Make Megatron's process groups. False if they exist; an ``EngineError`` if those are of other sizes."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            order="tp-cp-ep-pp-dp",
            distributed_timeout_minutes=timeout_s / 60,  # need not be an integer
        )
        state = torch.cuda.get_rng_state()
        model_parallel_cuda_manual_seed(0)  # sequence parallel asks for a random state, which without dropout is unused
        torch.cuda.set_rng_state(state)
        return True
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    if (tensor, pipeline) != (layout.tensor, layout.pipeline):
        raise EngineError(
            f"this process runs megatron with tensor_parallel_size {tensor} and pipeline_parallel_size {pipeline}"
            f" already, not {layout.tensor} and {layout.pipeline}"
        )
    return False
