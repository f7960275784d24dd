"""TEACHER: a model that a policy learns from; it judges the policy's own samples."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.device_turns import on_device
from dlrover.python.rl.recipe.members import TRAINED, vocabulary_mark
from dlrover.python.rl.recipe.reference import ReferenceWorkload
from dlrover.python.rl.trainer.workload import trainer_invocation


@dataclass(frozen=True)
class TeacherConfig:
    """One of the teachers."""

    model: str
    """Folder or hub name of a causal language model with the policy's own vocabulary."""

    weight: Annotated[float, Gt(0.0)] = 1.0
    """What it counts beside other teachers."""


class TeacherWorkload(ReferenceWorkload):
    """TEACHER, or another role that ``config.teachers`` names: a frozen model of its own."""

    @trainer_invocation(target="RANK0")
    def vocabulary(self) -> str:
        """The mark of its vocabulary."""
        return vocabulary_mark(self._engine.tokenizer)

    @trainer_invocation(blocking=False)
    @on_device
    def judge(self, rollouts: Batch, temperature: float, top: int = 0) -> Batch:
        """``teacher_logprobs`` of the completions; or ``candidates``, the ``top`` most likely ids at each of their
        tokens, with ``teacher_logprobs`` of these, ``[seq, top]``."""
        told = self._engine.evaluate(rollouts.select(*TRAINED), temperature, top=top)
        if not top:
            return Batch({"teacher_logprobs": told["logprobs"]})
        return Batch({"candidates": told["candidates"], "teacher_logprobs": told["candidate_logprobs"]})
