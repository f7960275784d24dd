"""Models of steps on the way."""

from collections.abc import Mapping
from typing import Any

from dlrover.python.rl.trainer.trainer import BaseTrainer


class SavesSteps(BaseTrainer):
    """Writes the model to ``step_<number>`` every ``saving_steps`` steps, before the step is reported."""

    cfg: Any

    def log(self, step: int, metrics: Mapping[str, float] | None = None, **more: float) -> None:
        """Save, and report."""
        if step % self.cfg.saving_steps == 0:
            self.RG_ACTOR.save(self.job_dir / f"step_{step}")
        super().log(step, metrics, **more)
