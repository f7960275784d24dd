"""The way from prompts to judged samples, and from the actor's weights to the rollouts that draw them."""

from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.jsonl import raise_problems
from dlrover.python.rl.engine.base import SamplingParams
from dlrover.python.rl.recipe.config import PolicyConfig
from dlrover.python.rl.recipe.failures import Drawn, failed_groups, prompts_of, with_attempt
from dlrover.python.rl.recipe.problems import ProblemSource
from dlrover.python.rl.trainer.shard import Replicate, Shard


class Drawing:
    """Draws samples for a trainer from its ROLLOUT members, and has its REWARD members judge them.

    ::

        ACTOR weights -> ROLLOUT.generate -> REWARD.score
        problems -----------^

    Args:
        trainer: has the role groups.
        config: what to draw.
        problems: the prompts.
    """

    def __init__(self, trainer: Any, config: PolicyConfig, problems: ProblemSource) -> None:
        self._trainer, self._cfg, self.problems = trainer, config, problems
        rollout = config.rollout
        self.sampling = SamplingParams(rollout.max_new_tokens, rollout.temperature, rollout.samples_per_prompt)

    def first_look(self) -> Any:
        """The rewards ``[rows]`` of the held-out problems before training.

        Raises:
            DataError: the model cannot complete some of the prompts; names each by its row (20 at most), now rather
                than in the step that draws it.
        """
        found = self._trainer.RG_ROLLOUT.check_prompts(Shard(self.problems.places), self.sampling)
        if problems := [problem for part in found for problem in part]:
            raise_problems(problems)
        return self.evaluate(0).dense("reward")

    def draw(self, step: int) -> Drawn:
        """Draw and judge a step's samples; groups with a failed one again, if the configuration says so."""
        prompts = self.problems.next()
        reward = self._cfg.reward
        drawn = self._draw(step, prompts)
        for attempt in range(1, reward.max_redraws + 1 if reward.on_failure == "redraw" else 1):
            again = prompts_of(prompts, failed_groups(drawn.scored))
            if len(again):
                drawn = drawn.followed_by(self._draw(step, again, attempt))
        return drawn

    def _draw(self, step: int, prompts: Batch, attempt: int = 0) -> Drawn:
        """Draw and judge samples of these prompts. They depend on the job's seed, step, attempt, prompt and index."""
        rows = len(prompts) * self.sampling.samples_per_prompt
        seed = Replicate((self._cfg.seed, step, *([attempt] if attempt else ())))
        rollouts = over(self._trainer.RG_ROLLOUT, "generate", len(prompts))(Shard(prompts), self.sampling, seed)
        scored = Batch.concat(over(self._trainer.RG_REWARD, "score", rows)(Shard(rollouts)))
        self.check_versions(step, scored)
        return Drawn(rollouts, with_attempt(scored, attempt))

    def sync_weights(self) -> None:
        """Give the actor's weights to every rollout member; returns once all of them serve just these.

        Raises:
            WeightSyncError: a rollout holds others.
        """
        ticket, *_ = self._trainer.RG_ACTOR.publish_weights()
        received = self._trainer.RG_ROLLOUT.receive_weights(Replicate(ticket))
        (self._synced,) = self._trainer.RG_ACTOR.published()
        for rank, stamp in enumerate(received):
            if stamp != self._synced:
                raise WeightSyncError(f"ROLLOUT[{rank}] received weights of {stamp}, not of {self._synced}")

    def check_versions(self, step: int, drawn: Batch) -> None:
        """Refuse samples of other weights than those just synced.

        Raises:
            WeightSyncError: names both versions.
        """
        for version in np.unique(drawn.dense("version")).tolist():
            if version != self._synced.version:
                what = f"samples were drawn by weights of version {version}, not {self._synced.version}"
                raise WeightSyncError(f"step {step}: {what}, which was just synced")

    def evaluate(self, step: int) -> Batch:
        """Greedy answers to the held-out problems, judged, by the weights that were synced last."""
        greedy = SamplingParams(self._cfg.rollout.max_new_tokens, temperature=0.0, samples_per_prompt=1)
        seed = Replicate((self._cfg.seed, step))
        drawn = self._trainer.RG_ROLLOUT.generate(Shard(self.problems.held_out), greedy, seed)
        answers = Batch.concat(self._trainer.RG_REWARD.score(Shard(drawn)))
        self.check_versions(step, answers)
        return answers


def over(group: Any, method: str, rows: int) -> Any:
    """A method of all members, or of the first alone where there are fewer rows than members."""
    return getattr(group, method).options(target="ALL" if rows >= len(group) else "RANK0")
