# SPDX-License-Identifier: Apache-2.0
"""A loop of two steps; one of the texts is empty, and you want to see why."""

import json

from dlrover.rl import BaseTrainer, Shard


class ScoreTrainer(BaseTrainer):
    """Roles ACTOR and REWARD."""

    def init(self) -> None:
        """Nothing to load."""

    def fit(self) -> None:
        """Score the texts twice."""
        texts = list(self.config.texts)
        for step in self.steps(2):
            scores = self.RG_REWARD.score(texts)
            (total,) = self.RG_ACTOR.add(Shard([score for part in scores for score in part]))
            self.log(step, reward=total / len(texts))
        (self.job_dir / "total.json").write_text(json.dumps({"total": total, "texts": len(texts)}), encoding="utf-8")
