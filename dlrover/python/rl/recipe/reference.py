"""REFERENCE: a frozen model that judges tokens."""

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.base import (
    Rendezvous,
    TrainEngine,
)
from dlrover.python.rl.engine.layout import ParallelSizes
from dlrover.python.rl.engine.registry import TRAIN, engine_class
from dlrover.python.rl.recipe.config import EngineConfig
from dlrover.python.rl.recipe.device_turns import EngineWorkload, on_device
from dlrover.python.rl.recipe.members import TRAINED, device_of, train_settings, use_threads, warming
from dlrover.python.rl.trainer.workload import trainer_invocation


class ReferenceWorkload(EngineWorkload):
    """REFERENCE: a frozen copy of the policy at its start."""

    @classmethod
    def warm_up(cls) -> None:
        """Import and build what loading a model and evaluating it need."""
        warming().warm_reference()

    def init_model(self, model: str, engine: EngineConfig) -> None:
        """Load the frozen policy."""
        use_threads(engine.threads)
        device = device_of(self, engine)
        settings, made = train_settings(engine, device, ParallelSizes()), engine_class(TRAIN, engine.train)
        with self._first_turn(device) as memory:
            self._engine: TrainEngine = made(model, None, settings, Rendezvous(), memory)

    @trainer_invocation(blocking=False)
    @on_device
    def logprobs(self, rollouts: Batch, temperature: float) -> Batch:
        """``ref_logprobs`` of the completions."""
        return Batch({"ref_logprobs": self._engine.evaluate(rollouts.select(*TRAINED), temperature)["logprobs"]})
