"""A train engine on DeepSpeed: ZeRO 1 to 3 over any Hugging Face model."""

import logging
import os
import warnings

import torch

from dlrover.python.rl.common.errors import EngineError, MissingExtra
from dlrover.python.rl.config.typed import require
from dlrover.python.rl.engine.abilities import optimizer_faults, refuse, train_faults
from dlrover.python.rl.engine.base import Rendezvous
from dlrover.python.rl.engine.deepspeed.options import DeepSpeedOptions
from dlrover.python.rl.engine.layout import Layout
from dlrover.python.rl.engine.torch.ranks import Ranks
from dlrover.python.rl.engine.torch.residence import Residence
from dlrover.python.rl.engine.torch.shell import TrainShell

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

# DeepSpeed calls torch's collectives by the names that older versions of torch have, at every step.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


class DeepSpeedTrainEngine(TrainShell):
    """Implements :class:`~dlrover.python.rl.engine.base.TrainEngine` on DeepSpeed.

    All ranks have rows of their own, and divide what ``backend: {zero_stage: ...}`` says
    (:class:`~dlrover.python.rl.engine.deepspeed.options.DeepSpeedOptions`). With ``precision: bf16`` the parameters
    are float32 and the passes run under autocast. A checkpoint is for the layout and stage that wrote it.

    Raises:
        MissingExtra: deepspeed is not installed (on import).
    """

    def _connect(self, rendezvous: Rendezvous) -> Ranks:
        settings = self._settings
        self._stage = require(DeepSpeedOptions, settings.backend, "backend").zero_stage
        refuse(train_faults("deepspeed", settings.parallel, settings.lora is not None))
        if self._config is not None:
            refuse(optimizer_faults("deepspeed", self._config))
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
            # Its sums by shared memory have to be compiled on the spot, and a build that is cut off blocks all others.
            __compatible_ops__["deepspeed_shm_comm"] = False
        ranks = Ranks.connect(rendezvous, settings.device, always=True)
        deepspeed.init_distributed(dist_init_required=False)
        ranks.bound(groups._get_data_parallel_group())
        return ranks

    def _make(self, loaded: bool) -> DeepSpeedBackend:
        residence = Residence(self._owner, self._memory)
        return DeepSpeedBackend(
            self._blueprint, self._config, self._settings, self._stage, self._ranks, residence, loaded
        )

    def _leave(self) -> None:
        """Leave the other ranks, with all that DeepSpeed has noted of them."""
        if self._ranks.owns_group:
            deepspeed.comm.destroy_process_group()
        super()._leave()
