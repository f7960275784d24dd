"""The default train engine: PyTorch's FSDP2, DTensor and DCP over any Hugging Face model."""

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.abilities import refuse, train_faults
from dlrover.python.rl.engine.base import Rendezvous
from dlrover.python.rl.engine.fsdp2.grid import Grid
from dlrover.python.rl.engine.fsdp2.model import TrainedModel
from dlrover.python.rl.engine.torch.ranks import Ranks
from dlrover.python.rl.engine.torch.shell import TrainShell


class Fsdp2TrainEngine(TrainShell):
    """Implements :class:`~dlrover.python.rl.engine.base.TrainEngine` on PyTorch's own means.

    Only the ranks that shard or split the model exchange it: copies of a whole model exchange gradients and small sums.
    """

    def _connect(self, rendezvous: Rendezvous) -> Ranks:
        settings = self._settings
        if settings.backend:
            raise EngineError(f"fsdp2 has no options of its own, but was given {', '.join(settings.backend)}")
        refuse(train_faults("fsdp2", settings.parallel, settings.lora is not None))
        ranks = Ranks.connect(rendezvous, settings.device)
        with ranks.left_on_failure():
            self._grid = Grid.of(ranks, settings.parallel, settings.device)
        self.layout = self._grid.layout
        return ranks

    def _make(self, loaded: bool) -> TrainedModel:
        model = TrainedModel.build(self._blueprint, self._config, self._settings, self._ranks, self._grid, loaded)
        return model.reside(self._owner, self._memory)
