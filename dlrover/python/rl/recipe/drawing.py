"""The way from prompts to judged samples, and from the actor's weights to the rollouts that draw them."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.jsonl import raise_problems
from dlrover.python.rl.recipe.config import PolicyConfig, greedy_sampling, training_sampling
from dlrover.python.rl.recipe.failures import failed_groups, rewards_of
from dlrover.python.rl.recipe.flight import Flight, Group
from dlrover.python.rl.recipe.held_out import Judged, judged
from dlrover.python.rl.recipe.problems import ProblemSource
from dlrover.python.rl.recipe.step_samples import Drawn
from dlrover.python.rl.recipe.syncing import give_weights
from dlrover.python.rl.trainer.port import STRAGGLER_LOG_INTERVAL_S, Pending
from dlrover.python.rl.trainer.shard import Replicate, Shard

_LOG = get_logger(__name__)

_FIRST_LOOK_S, _LOOK_AGAIN = 0.25, 0.1
"""After how long the trainer first asks how far the rollouts are; and later, in what share of the time that it has
waited. In between no member is given what another has not begun."""


class Drawing:
    """Draws samples for a trainer from its ROLLOUT members, and has its REWARD members judge them.

    ::

        ACTOR weights --> ROLLOUT.draw (until enough groups are complete) --> .take --> REWARD.score --> Drawn
        problems -----------^                                                             '-> failed, or all alike:
                                                                                              draw again

    Each call of ``draw`` tells every member all that it shall have: what it does not know it begins, what is not told
    any more it gives up. So a member that takes another's place needs nothing else, nor does a run that went back.

    Args:
        trainer: has the role groups, and the state that lasts.
        config: what to draw.
        problems: the prompts.
    """

    def __init__(self, trainer: Any, config: PolicyConfig, problems: ProblemSource) -> None:
        self._trainer, self._cfg, self.problems = trainer, config, problems
        self.sampling, rollout = training_sampling(config.rollout), config.rollout
        self._members = len(trainer.RG_ROLLOUT)
        self._flight = trainer.state["flight"] = Flight(
            config.prompts_per_step, rollout.max_staleness, self._members, problems.rows
        )

    # -- weights ------------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Give the actor's weights to every rollout member; returns once all of them serve just these.

        Raises:
            WeightSyncError: a rollout holds others.
        """
        self._synced = give_weights(self._trainer)
        self._flight.serves(self._synced.version)

    def check_versions(self, step: int, drawn: Batch, max_staleness: int = 0) -> None:
        """Refuse samples with tokens of other weights than those just synced, or than the last few.

        Raises:
            WeightSyncError: names both versions.
        """
        oldest = drawn.dense("oldest")
        for version in np.unique(oldest[oldest >= 0]).tolist():  # -1: the sample failed before a token was drawn
            if version > self._synced.version or self._flight.staleness(version) > max_staleness:
                what = f"samples were drawn by weights of version {version}, not {self._synced.version}"
                least = f" or the {max_staleness} served before" if max_staleness else ""
                raise WeightSyncError(f"step {step}: {what}, which was just synced{least}")

    # -- samples ------------------------------------------------------------------------------------------------------

    def draw(self, step: int) -> Drawn:
        """Draw and judge the samples of a step; those of failed and of filtered groups again, if the configuration
        says so."""
        wanted, rollout = self._cfg.prompts_per_step, self._cfg.rollout
        refills = rollout.max_refills if rollout.dynamic_filtering == "refill" else 0
        self._flight.begin()
        parts: list[Drawn] = []
        for _ in range(1 + refills):
            missing = wanted - sum(part.groups for part in parts)
            if not missing:
                break
            room = self._flight.room(self._cfg.steps - step + 1, kept=wanted - missing)
            self._flight.ask(step, self.problems.draw(room))
            parts.append(self._draw(step, missing))
        return Drawn.joined(parts)

    def _draw(self, step: int, count: int) -> Drawn:
        """Draw and judge so many groups, less those that are filtered out."""
        groups, reward = self._wait_for(count), self._cfg.reward
        drawn = self._judged(step, groups)
        for _ in range(reward.max_redraws if reward.on_failure == "redraw" else 0):
            again = failed_groups(drawn.scored)
            groups = [group for group in groups if group.prompt_id in again]
            if groups:
                self._flight.ask_again(step, groups)
                groups = self._wait_for(len(groups))
                drawn = Drawn.joined([drawn, replace(self._judged(step, groups), groups=0)])
        filtering = self._cfg.rollout.dynamic_filtering != "off"
        return drawn.without_alike(rewards_of(drawn.scored, reward)) if filtering else drawn

    def _wait_for(self, count: int) -> list[Group]:
        """Wait until so many groups can be trained on."""
        flight, began_s, patience_s, told_s = self._flight, time.monotonic(), _FIRST_LOOK_S, STRAGGLER_LOG_INTERVAL_S
        while True:
            theirs = [flight.of(member) for member in range(self._members)]
            complete = [sum(group.complete for group in groups) for groups in theirs]
            share = -(-max(count - sum(complete), 1) // self._members)
            heard = self._trainer.RG_ROLLOUT.draw(
                [self._asked(groups) for groups in theirs],
                self.sampling,
                self._cfg.seed,
                [number + share for number in complete],
                patience_s,
            )
            for groups, told in zip(theirs, heard, strict=True):
                columns = [told.dense(name).tolist() for name in ("begun", "complete", "oldest")]
                for group, *now in zip(groups, *columns, strict=True):
                    flight.heard(group.key, *now)
            if (taken := flight.take(count)) is not None:
                return taken
            flight.spread()
            waited_s = time.monotonic() - began_s
            patience_s = max(_FIRST_LOOK_S, _LOOK_AGAIN * waited_s)
            if waited_s > told_s:
                told_s = waited_s + STRAGGLER_LOG_INTERVAL_S
                _LOG.warning("still waiting for samples after %.0f s: %s", waited_s, flight.told())

    def _judged(self, step: int, groups: Sequence[Group]) -> Drawn:
        """Take complete groups, and have them judged."""
        theirs = [[group for group in groups if group.member == member] for member in range(self._members)]
        rollouts = self._trainer.RG_ROLLOUT.take([self._asked(groups) for groups in theirs])
        rows = len(groups) * self.sampling.samples_per_prompt
        scored = self._scored(rollouts, rows)
        self.check_versions(step, scored, self._cfg.rollout.max_staleness)
        attempt = {group.prompt_id: group.attempt for group in groups}
        place = {group.prompt_id: at for at, group in enumerate(groups)}
        ids = scored.dense("prompt_id").tolist()
        scored = scored.with_columns(attempt=np.array([attempt[prompt_id] for prompt_id in ids], dtype=np.int64))
        if self._cfg.rollout.max_staleness:
            stale = [self._flight.staleness(version) for version in scored.dense("oldest").tolist()]
            scored = scored.with_columns(staleness=np.array(stale, dtype=np.int64))
        order = np.argsort([place[prompt_id] for prompt_id in ids], kind="stable")
        return Drawn.of(rollouts, scored, order, len(groups))

    def _scored(self, rollouts: Pending, rows: int) -> Batch:
        """What the trainer knows of so many samples or more: an environment has judged them already."""
        if self._cfg.rollout.env_path is not None:
            told = over(self._trainer.RG_ROLLOUT, "told", rows)
        else:
            told = over(self._trainer.RG_REWARD, "score", rows)
        return Batch.concat(told(Shard(rollouts)))

    def _asked(self, groups: Sequence[Group]) -> Batch:
        """What a member is told of these groups."""
        told = {
            name: np.array([getattr(group, name) for group in groups], dtype=np.int64)
            for name in ("prompt_id", "begun_at", "attempt")
        }
        return self.problems.prompts([group.row for group in groups]).with_columns(**told)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def first_look(self) -> Judged:
        """What the answers to the held-out problems are worth before training; prompts that are too long are left out
        from here on, if the configuration says so.

        Raises:
            DataError: the model cannot complete some of the prompts, or they are too long; names each by its row (20 at
                most), now rather than in the step that draws it.
        """
        data, places = self._cfg.data, Shard(self.problems.places)
        found = self._trainer.RG_ROLLOUT.check_prompts(places, self.sampling, data.max_prompt_tokens)
        too_long = [problem for part in found for problem in part.too_long]
        refused = too_long if data.over_long == "refuse" else []
        if problems := [*(problem for part in found for problem in part.wrong), *refused]:
            raise_problems(problems)
        self.problems.leave_out(too_long)
        return judged(self.evaluate(0))

    def evaluate(self, step: int) -> Batch:
        """Greedy answers to the held-out problems, judged, by the weights that were synced last."""
        greedy = greedy_sampling(self._cfg.rollout)
        seed = Replicate((self._cfg.seed, step))
        rows = len(self.problems.held_out)
        drawn = over(self._trainer.RG_ROLLOUT, "generate", rows)(Shard(self.problems.held_out), greedy, seed)
        answers = self._scored(drawn, rows)
        self.check_versions(step, answers)
        return answers


def over(group: Any, method: str, rows: int) -> Any:
    """A method of all members, or of the first alone where there are fewer rows than members."""
    return getattr(group, method).options(target="ALL" if rows >= len(group) else "RANK0")
