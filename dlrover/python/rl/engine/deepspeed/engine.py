# SPDX-License-Identifier: Apache-2.0
"""A train engine on DeepSpeed: ZeRO 1 to 3 over any Hugging Face model."""

import logging
import os
import warnings

import torch

from dlrover.python.rl.common.errors import EngineError, MissingExtra
from dlrover.python.rl.engine.api.base import Rendezvous
from dlrover.python.rl.engine.api.settings import Layout
from dlrover.python.rl.engine.deepspeed import INFO, DeepSpeedOptions
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.training.train_engine_base import BackendTrainEngine

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed looks for an accelerator when it is imported.
try:
    import deepspeed
except ImportError as error:
    raise MissingExtra("deepspeed", "deepspeed") from error

from deepspeed.accelerator import get_accelerator
from deepspeed.ops import __compatible_ops__
from deepspeed.utils import groups

from dlrover.python.rl.engine.deepspeed.backend import DeepSpeedBackend

# DeepSpeed calls torch's collectives by deprecated names, at every step.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


class DeepSpeedTrainEngine(BackendTrainEngine):
    """All ranks have different rows, and divide what ``backend: {zero_stage: ...}`` says.

    With ``precision: bf16`` a rank has its parameters in bf16, and its part of their masters and gradients in float32.
    A checkpoint can only be read in the layout, stage and precision that wrote it.

    Raises:
        MissingExtra: deepspeed is not installed (on import).
    """

    name, info = "deepspeed", INFO

    def _connect(self, rendezvous: Rendezvous) -> Ranks:
        settings = self._settings
        device = torch.device(settings.device)
        if get_accelerator().device_name() != device.type:
            raise EngineError(
                f"the device is '{device}', but DeepSpeed was set up for '{get_accelerator().device_name()}' on import:"
                " set DS_ACCELERATOR"
            )
        self.layout = Layout.of(rendezvous.world_size, settings.parallel)
        os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed takes its device from there
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        if device.type == "cpu":
            # Its shared-memory collectives are compiled on first use, and an interrupted build blocks all others.
            __compatible_ops__["deepspeed_shm_comm"] = False
        ranks = Ranks.connect(rendezvous, settings.device, always=True)
        deepspeed.init_distributed(dist_init_required=False)
        ranks.set_timeout(groups._get_data_parallel_group())
        return ranks

    def _make(self, loaded: bool) -> DeepSpeedBackend:
        parked = ParkedTensors(self._owner, self._memory)
        assert isinstance(self._options, DeepSpeedOptions)
        return DeepSpeedBackend(self._spec, self._config, self._settings, self._options, self._ranks, parked, loaded)

    def _leave(self) -> None:
        if self._ranks.owns_group:
            deepspeed.comm.destroy_process_group()
        super()._leave()
