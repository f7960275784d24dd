# SPDX-License-Identifier: Apache-2.0
"""REFERENCE and TEACHER: frozen models that compute log-probs of the policy's samples."""

from collections.abc import Iterable
from typing import Any, ClassVar

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.config.typed import salvage
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import Rendezvous
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.base.engine_workload import EngineWorkload, on_device
from dlrover.python.rl.recipe.base.updates import TRAINED
from dlrover.python.rl.trainer.workload import trainer_invocation


class ReferenceWorkload(EngineWorkload):
    """REFERENCE: a frozen copy of the initial policy."""

    recipe_class: ClassVar[str | None] = "ReferenceWorkload"
    sharded_class: ClassVar[str] = "ShardedReferenceWorkload"  # the class whose workers hold a part of the model each

    @classmethod
    def check_config(cls, config: Any) -> Iterable[ConfigError]:
        engine, _ = salvage(EngineConfig, config.get("engine") or {}, "config.engine")
        if engine is None:
            return []
        if engine.shard_frozen and engine.train != "fsdp2":
            return [ConfigError("config.engine.shard_frozen", f"needs fsdp2: {engine.train} holds copies")]
        if engine.shard_frozen == cls.needs_own_process:
            return []
        needed = f"needs the class {cls.sharded_class}" if engine.shard_frozen else f"has to be true for {cls.__name__}"
        return [ConfigError("config.engine.shard_frozen", needed)]

    def init_model(self, model: str, engine: EngineConfig) -> None:
        address = self.torch_master_addr, self.torch_master_port
        ranks = Rendezvous(self.rank, self.world_size, *address) if self.needs_own_process else Rendezvous()
        self._make_train_engine(model, engine, rendezvous=ranks)

    @trainer_invocation(blocking=False)
    @on_device
    def logprobs(self, rollouts: Batch, temperature: float) -> Batch:
        return Batch({"ref_logprobs": self._engine.evaluate(rollouts.select(*TRAINED), temperature)["logprobs"]})


class TeacherWorkload(ReferenceWorkload):
    """TEACHER, or another role that ``config.teachers`` names."""

    recipe_class = "TeacherWorkload"
    sharded_class = "ShardedTeacherWorkload"

    @trainer_invocation(blocking=False)
    @on_device
    def teacher_logprobs(self, rollouts: Batch, temperature: float, top: int = 0) -> Batch:
        """Compute ``teacher_logprobs`` of the completions; with ``top``, ``candidates``, the most likely ids at each of
        their tokens, and the ``teacher_logprobs`` of these, both ``[seq, top]``."""
        outputs = self._engine.evaluate(rollouts.select(*TRAINED), temperature, top=top)
        if not top:
            return Batch({"teacher_logprobs": outputs["logprobs"]})
        return Batch({"candidates": outputs["candidates"], "teacher_logprobs": outputs["candidate_logprobs"]})


class ShardedReferenceWorkload(ReferenceWorkload):
    """REFERENCE: each worker holds a part of a frozen copy, and gathers it layer by layer."""

    needs_own_process = True


class ShardedTeacherWorkload(ShardedReferenceWorkload, TeacherWorkload):
    """TEACHER: each worker holds a part of the model."""
