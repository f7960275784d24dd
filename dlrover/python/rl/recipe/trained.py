"""What the roles have in common whose model is trained: ACTOR, CRITIC."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from dlrover.python.rl.config.typed import require
from dlrover.python.rl.engine.base import LoraSettings, OptimizerConfig, Rendezvous, TrainEngine
from dlrover.python.rl.engine.layout import ParallelSizes
from dlrover.python.rl.engine.registry import TRAIN, engine_class
from dlrover.python.rl.engine.torch.packing import Head
from dlrover.python.rl.engine.torch.randomness import random_state, seed_random, set_random_state
from dlrover.python.rl.recipe.config import EngineConfig
from dlrover.python.rl.recipe.device_turns import EngineWorkload
from dlrover.python.rl.recipe.members import (
    device_of,
    parallel_sizes,
    train_settings,
    use_threads,
    vocabulary_mark,
    warming,
)
from dlrover.python.rl.trainer.workload import trainer_invocation


class TrainedWorkload(EngineWorkload):
    """Holds a model that is trained. Several members divide the rows, and the model by ``engine.parallel``.

    Every rank saves its own state. Where each has a copy of the model, which is the default where the engine can, that
    is the whole, the same on all of them: 12 bytes a parameter and rank, written side by side. So a rank comes back
    from its own file whatever became of the others, without a collective in the middle of a recovery that another loss
    could break.
    """

    needs_own_process = True

    head: ClassVar[Head] = "causal"
    """What the model's outputs are."""

    head_bias: ClassVar[bool] = True
    """Whether a token head has a bias."""

    _engine: TrainEngine

    @classmethod
    def warm_up(cls) -> None:
        """Import and build what loading a model, an update and a commit need."""
        warming().warm_actor()

    @classmethod
    def data_parallel_size(cls, config: Any, world_size: int) -> int:
        """Members that have rows of their own: without those that split a matrix, a sequence or the layers."""
        engine = require(EngineConfig, config.get("engine") or {}, "config.engine")
        return world_size // (engine.parallel or ParallelSizes()).replica_size

    def _load(
        self, model: str, engine: EngineConfig, optimizer: OptimizerConfig, seed: int, lora: LoraSettings | None = None
    ) -> None:
        """Load the model and meet the other ranks; the process's random generators then follow from ``seed``."""
        use_threads(engine.threads)
        meeting = Rendezvous(self.rank, self.world_size, self.torch_master_addr, self.torch_master_port)
        device = device_of(self, engine)
        settings = train_settings(engine, device, parallel_sizes(engine, self.world_size))
        settings = replace(settings, lora=lora, head=self.head, head_bias=self.head_bias)
        made = engine_class(TRAIN, engine.train)
        with self._first_turn(device) as memory:
            self._engine = made(model, optimizer, settings, meeting, memory)
        seed_random(seed, self.role, self.rank)

    @trainer_invocation(target="RANK0")
    def vocabulary(self) -> str:
        """The mark of the model's vocabulary."""
        return vocabulary_mark(self._engine.tokenizer)

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, version and random states: all that later steps depend on, bit for bit."""
        return {"engine": self._engine.state_dict(), "random": random_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what :meth:`state_dict` gave; the model has been loaded by ``init_model``."""
        self._engine.load_state_dict(state["engine"])
        set_random_state(state["random"])
