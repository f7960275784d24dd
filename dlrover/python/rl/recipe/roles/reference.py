# SPDX-License-Identifier: Apache-2.0
"""REFERENCE and TEACHER: frozen models that compute log-probs of the policy's samples."""

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.base.engine_workload import EngineWorkload, on_device
from dlrover.python.rl.recipe.base.updates import TRAINED
from dlrover.python.rl.trainer.workload import trainer_invocation


class ReferenceWorkload(EngineWorkload):
    """REFERENCE: a frozen copy of the initial policy."""

    def init_model(self, model: str, engine: EngineConfig) -> None:
        self._make_train_engine(model, engine)

    @trainer_invocation(blocking=False)
    @on_device
    def logprobs(self, rollouts: Batch, temperature: float) -> Batch:
        return Batch({"ref_logprobs": self._engine.evaluate(rollouts.select(*TRAINED), temperature)["logprobs"]})


class TeacherWorkload(ReferenceWorkload):
    """TEACHER, or another role that ``config.teachers`` names."""

    @trainer_invocation(blocking=False)
    @on_device
    def teacher_logprobs(self, rollouts: Batch, temperature: float, top: int = 0) -> Batch:
        """``teacher_logprobs`` of the completions; or ``candidates``, the ``top`` most likely ids at each of their
        tokens, with ``teacher_logprobs`` of these, ``[seq, top]``."""
        outputs = self._engine.evaluate(rollouts.select(*TRAINED), temperature, top=top)
        if not top:
            return Batch({"teacher_logprobs": outputs["logprobs"]})
        return Batch({"candidates": outputs["candidates"], "teacher_logprobs": outputs["candidate_logprobs"]})
