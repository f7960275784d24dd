# SPDX-License-Identifier: Apache-2.0
"""The collection of scored samples from prompts, and the way of the actor's weights to the rollouts."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import ReplayDiverged, WeightSyncError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.jsonl import raise_errors
from dlrover.python.rl.engine.api.weights import WeightStamp
from dlrover.python.rl.engine.weight_sync.base import Ticket
from dlrover.python.rl.recipe.base.config import PolicyConfig, training_sampling
from dlrover.python.rl.recipe.online.batch import StepBatch
from dlrover.python.rl.recipe.online.prompts import PromptSource
from dlrover.python.rl.recipe.reporting.rewards import Scores, collect_scores, find_failed_groups, trainable_rewards
from dlrover.python.rl.recipe.rollout.episodes import Group, GroupKey
from dlrover.python.rl.trainer.port import STRAGGLER_LOG_INTERVAL_S, Pending
from dlrover.python.rl.trainer.shard import Replicate, Shard


def estimate_groups(varied: int, counts: Sequence[Sequence[int]]) -> int:
    """Return how many groups to sample for ``varied`` ones with different rewards, by the share of these. ``counts``
    has the number of groups of each of the last steps, and of those with different rewards: whole numbers, so that a
    resumed run requests as many as an undisturbed one. One more with different rewards counts as seen."""
    groups, different = (1 + sum(of_step[index] for of_step in counts) for index in range(2))
    return -(-varied * groups // different)


@dataclass
class StalenessTracker:
    """The open groups, in the order they were requested: bookkeeping, without a clock or a call.

    A group may run while others are trained on and new weights arrive. Its **staleness** is the number of weight
    versions served since its oldest token. Two rules bound it without discarding samples:

    * at most ``(max_staleness + 1) * groups_per_step`` groups are open at a time;
    * a step takes the stalest complete groups, and only if the remaining ones can be trained on in time: at most
      ``n * groups_per_step`` groups may be due within the next ``n`` steps. Otherwise it waits.

    With dynamic sampling a step requests, and the next ones will take, more groups than they train on. If they need
    fewer, groups that would be too stale in the next step are closed, and their prompts are requested again.

    ``rows`` is the number of prompts: a group's ``prompt_id`` is its row plus a multiple of it.

    If workers are missing, the present ones process several ``shares`` in turn, not larger ones: the last bits of
    log-probs depend on how many samples are generated together."""

    groups_per_step: int
    max_staleness: int
    members: int
    rows: int
    shares: int = 0  # 0: one per worker
    open: dict[GroupKey, Group] = field(default_factory=dict)
    _step_ids: set[int] = field(default_factory=set)
    _versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shares = self.shares or self.members
        self._bound, self._taken_per_step = self.groups_per_step * (self.max_staleness + 1), self.groups_per_step

    def capacity(self, remaining_steps: int, wanted: int, per_step: int) -> int:
        """Number of groups to request if this step takes ``wanted`` more and later ones ``per_step``, which is at least
        ``groups_per_step``; ``remaining_steps`` includes this step."""
        self._bound = wanted + self.groups_per_step * min(self.max_staleness, remaining_steps - 1)
        self._taken_per_step = per_step
        return max(0, self._bound - len(self.open))

    def request(self, step: int, rows: Iterable[int]) -> None:
        """Open a group for each row, with a prompt id that is unique among the groups this step may train on."""
        used = self._step_ids | {group.prompt_id for group in self.open.values()}
        for row in rows:
            prompt_id = row
            while prompt_id in used:
                prompt_id += self.rows
            used.add(prompt_id)
            self.open[GroupKey(prompt_id, 0, step)] = Group(prompt_id, step, row=row)
        self.assign_shares()

    def retry(self, step: int, groups: Iterable[Group]) -> None:
        for group in groups:
            again = Group(group.prompt_id, step, group.retry + 1, group.row, group.share)
            self.open[again.key] = again
        self.assign_shares()

    def assign_shares(self) -> None:
        load = [0] * self.shares
        for group in self.open.values():
            load[group.share] += group.started and not group.complete
        for group in self.open.values():
            if not group.started:
                group.share = load.index(min(load))
                load[group.share] += 1

    def groups_of(self, member: int) -> list[Group]:
        """Return the groups of a worker in order. Groups beyond the bound, which may have fallen, wait unless they have
        started, and so does a share until the shares before it are complete."""
        timely = [group for index, group in enumerate(self.open.values()) if index < self._bound or group.started]
        groups = list[Group]()
        for share in range(member, self.shares, self.members):
            groups += [group for group in timely if group.share == share]
            if not all(group.complete for group in groups):
                break
        return groups

    def set_version(self, version: int) -> None:
        """Note that the rollouts serve these weights; later versions are forgotten, since the run went back."""
        earlier = [served for served in self._versions if served < version]
        self._versions = [*earlier, version][-self.max_staleness - 2 :]

    def update_status(self, key: GroupKey, started: bool, complete: bool, min_version: int) -> None:
        if group := self.open.get(key):
            group.started, group.complete, group.min_version = started, complete, min_version

    def staleness(self, version: int) -> int:
        """Number of weight versions served since ``version`` (-1: the current one); above the bound if it is old."""
        if version < 0:
            return 0
        if self._versions and version < self._versions[0]:
            return self.max_staleness + 1
        return sum(served > version for served in self._versions)

    def summary(self) -> str:
        groups = [self.groups_of(member) for member in range(self.members)]
        counts = [(sum(group.complete for group in of_member), len(of_member)) for of_member in groups]
        return ", ".join(f"ROLLOUT[{rank}] has {done} of {total} groups" for rank, (done, total) in enumerate(counts))

    def take(self, count: int) -> list[Group] | None:
        """Close the ``count`` stalest complete groups and return them; None if the step has to wait."""
        complete = [group for group in self.open.values() if group.complete]
        if len(complete) < count:
            return None
        keys = {group.key for group in sorted(complete, key=lambda group: -self.staleness(group.min_version))[:count]}
        later = [group for group in self.open.values() if group.started and group.key not in keys]
        for steps in range(self.max_staleness):
            due = [group for group in later if self.max_staleness - self.staleness(group.min_version) <= steps]
            if len(due) > steps * self._taken_per_step and not all(group.complete for group in due):
                return None
        self._step_ids |= {key.prompt_id for key in keys}
        return [self.open.pop(key) for key in list(self.open) if key in keys]

    def end_step(self, step: int, rows: Iterable[int]) -> int:
        """Close the groups that would be too stale in the next step, and request their prompts and ``rows``, which this
        step has not trained on, again for that step; return the number of closed groups."""
        due = [group for group in self.open.values() if self.staleness(group.min_version) >= self.max_staleness]
        late = [self.open.pop(group.key) for group in due if group.started]
        self._step_ids.clear()
        self.request(step + 1, [*rows, *(group.row for group in late)])
        return len(late)

    def state_dict(self) -> dict[str, Any]:
        groups = [[*group.key, group.row, group.share, group.started] for group in self.open.values()]
        return {"open": groups, "served": list(self._versions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume, with any number of workers: a started group stays with its worker, which still has it or generates it
        again from the same seeds."""
        self.open, self._step_ids = {}, set()
        for prompt_id, retry, created_step, row, share, started in state["open"]:
            group = Group(prompt_id, created_step, retry, row)
            if self.max_staleness and share < self.shares:  # with 0, no step leaves a group that has started
                group.share, group.started = share, started
            self.open[group.key] = group
        self._versions = list(state["served"])


_LOG = get_logger(__name__)

_COUNTED_STEPS = 8
"""The share of groups with equal rewards is taken over as many steps."""

_FIRST_POLL_S, _POLL_SHARE = 0.25, 0.1
"""Time before the first poll of the rollouts' progress, and between later ones as a share of the time waited so far.
Groups move to other workers between polls, if rollouts may run ahead."""


def sync_weights(trainer: Any) -> tuple[WeightStamp, int]:
    """Send the actor's weights to all rollout workers; returns their stamp and bytes. Raises WeightSyncError."""
    ticket, *_ = trainer.RG_ACTOR.publish_weights()
    stamps = trainer.RG_ROLLOUT.receive_weights(Replicate(ticket))
    published: WeightStamp
    (published,) = trainer.RG_ACTOR.published_stamp()
    for rank, stamp in enumerate(stamps):
        if stamp != published:
            raise WeightSyncError(f"ROLLOUT[{rank}] received weights of {stamp}, not of {published}")
    sent: Ticket = ticket.result()  # waits: no longer, since the rollouts have received it
    return published, sent.table.nbytes


def _diverged(rank: int, method: str) -> ReplayDiverged:
    message = "the repeated step requests different groups: when rollouts run ahead, the groups depend on timing"
    return ReplayDiverged(message, role="ROLLOUT", rank=rank, method=method)


def bind_method(group: Any, method: str, rows: int, **options: Any) -> Any:
    """Bind a method of all workers of a role group, or of the first alone if there are fewer rows than workers."""
    return getattr(group, method).options(target="ALL" if rows >= len(group) else "RANK0", **options)


class SampleCollector:
    """Collects the samples of a step from the ROLLOUT workers, and has the REWARD workers score them.

    ::

        ACTOR weights --> ROLLOUT.sample (until enough groups are complete) --> .fetch --> REWARD.score --> StepBatch
        prompts -------------^                                                                 '-> failed, or all
                                                                                        alike: sample again

    Each call of ``sample`` gives a worker the whole list of its groups: it starts new ones, and cancels groups that are
    not listed. A replaced worker, or a run that went back, needs nothing else."""

    def __init__(self, trainer: Any, config: PolicyConfig, prompts: PromptSource) -> None:
        self._trainer, self._cfg, self.prompts = trainer, config, prompts
        self.sampling, rollout = training_sampling(config.rollout), config.rollout
        self._members = len(trainer.RG_ROLLOUT)
        # if rollouts run ahead, the last bits depend on time anyway
        shares = self._members if rollout.max_staleness else trainer.RG_ROLLOUT.full_size
        trainer.state["group_counts"] = []
        self._tracker = trainer.state["staleness"] = StalenessTracker(
            config.prompts_per_step, rollout.max_staleness, self._members, prompts.rows, shares
        )

    def sync_weights(self) -> None:
        self._synced, self.synced_bytes = sync_weights(self._trainer)
        self._tracker.set_version(self._synced.version)

    def check_versions(self, step: int, rows: Batch, max_staleness: int = 0) -> None:
        """Raise WeightSyncError for tokens of other weights than those just synced or the ``max_staleness`` before."""
        versions = rows.dense("min_version")
        for version in np.unique(versions[versions >= 0]).tolist():  # -1: the sample failed before its first token
            if version > self._synced.version or self._tracker.staleness(version) > max_staleness:
                message = f"samples are from weights of version {version}; allowed is version {self._synced.version}"
                allowed = f", or up to {max_staleness} before it" if max_staleness else ""
                raise WeightSyncError(f"step {step}: {message}, just synced{allowed}")

    def collect(self, step: int) -> StepBatch:
        """Collect and score the samples of a step; replace failed and filtered groups if configured.

        With ``refill`` a request covers the groups that are probably filtered out. If fewer are, the last ones in the
        order of requests are not trained on; their prompts are the first of the next step, with other samples."""
        total, rollout = self._cfg.prompts_per_step, self._cfg.rollout
        refills = rollout.dynamic_filtering == "refill"
        budget = total * (1 + rollout.max_refills) if refills else total
        sampled, parts, earlier = [0, 0], list[StepBatch](), self._trainer.state["group_counts"][1 - _COUNTED_STEPS :]
        while (missing := total - sum(part.groups for part in parts)) and budget:
            wanted, per_step = (estimate_groups(varied, [*earlier, sampled]) for varied in (missing, total))
            wanted = min(wanted, budget)
            capacity = self._tracker.capacity(self._cfg.steps - step + 1, wanted, per_step)
            self._tracker.request(step, self.prompts.next_rows(capacity))
            # Which groups are complete first depends on time, so only rollouts that run ahead stop at enough.
            count = min(missing, wanted) if rollout.max_staleness else wanted
            budget -= count
            batch = self._sample_groups(step, count)
            if rollout.dynamic_filtering != "off":
                batch = batch.drop_uniform_groups(trainable_rewards(batch.scored, self._cfg.reward))
            if refills:
                sampled = [sampled[0] + count, sampled[1] + batch.groups]
                batch = batch.keep_groups(missing)
            parts.append(batch)
        self._trainer.state["group_counts"] = [*earlier, sampled]
        batch = StepBatch.concat(parts)
        late = self._tracker.end_step(step, [prompt_id % self.prompts.rows for prompt_id in batch.surplus])
        return replace(batch, late=late)

    def _sample_groups(self, step: int, count: int) -> StepBatch:
        """Wait for groups and fetch them, with the retries of failed ones."""
        reward = self._cfg.reward
        groups = self._wait_for(count)
        batch = self._fetch(step, groups)
        while reward.on_failure == "redraw":
            failed = find_failed_groups(batch.scored)
            groups = [each for each in groups if each.prompt_id in failed and each.retry < reward.max_redraws]
            if not groups:
                break
            self._tracker.retry(step, groups)
            groups = self._wait_for(len(groups))
            batch = StepBatch.concat([batch, replace(self._fetch(step, groups), groups=0)])
        return batch

    def _wait_for(self, count: int) -> list[Group]:
        tracker, start_s = self._tracker, time.monotonic()
        patience_s, log_after_s = _FIRST_POLL_S, STRAGGLER_LOG_INTERVAL_S
        while True:
            groups_by_rank = [tracker.groups_of(rank) for rank in range(self._members)]
            complete = [sum(group.complete for group in of_rank) for of_rank in groups_by_rank]
            share = -(-max(count - sum(complete), 1) // self._members)
            wanted = [self._describe(of_rank) for of_rank in groups_by_rank]
            enough = [number + share for number in complete]
            statuses = self._trainer.RG_ROLLOUT.sample(wanted, self.sampling, self._cfg.seed, enough, patience_s)
            for rank, (of_rank, status) in enumerate(zip(groups_by_rank, statuses, strict=True)):
                keys = zip(*(status.dense(name).tolist() for name in GroupKey._fields), strict=True)
                if list(keys) != [group.key for group in of_rank]:
                    raise _diverged(rank, "sample")
                columns = [status.dense(name).tolist() for name in ("started", "complete", "min_version")]
                for group, *values in zip(of_rank, *columns, strict=True):
                    tracker.update_status(group.key, *values)
            if (groups := tracker.take(count)) is not None:
                return groups
            if tracker.max_staleness:  # otherwise the last bits of log-probs must not depend on time
                tracker.assign_shares()
            waited_s = time.monotonic() - start_s
            patience_s = max(_FIRST_POLL_S, _POLL_SHARE * waited_s)
            if waited_s > log_after_s:
                log_after_s = waited_s + STRAGGLER_LOG_INTERVAL_S
                _LOG.warning("still waiting for samples after %.0f s: %s", waited_s, tracker.summary())

    def _fetch(self, step: int, groups: Sequence[Group]) -> StepBatch:
        groups_by_rank = [
            [group for group in groups if group.share % self._members == rank] for rank in range(self._members)
        ]
        rollouts = self._trainer.RG_ROLLOUT.fetch([self._describe(of_rank) for of_rank in groups_by_rank])
        scored = self._score(rollouts, len(groups) * self.sampling.samples_per_prompt)
        retry = {group.prompt_id: group.retry for group in groups}
        position = {group.prompt_id: index for index, group in enumerate(groups)}
        ids = scored.dense("prompt_id").tolist()
        if retry.keys() != set(ids):
            raise _diverged(0, "fetch")
        self.check_versions(step, scored, self._cfg.rollout.max_staleness)
        scored = scored.with_columns(retry=np.array([retry[prompt_id] for prompt_id in ids], dtype=np.int64))
        if self._cfg.rollout.max_staleness:
            staleness = [self._tracker.staleness(version) for version in scored.dense("min_version").tolist()]
            scored = scored.with_columns(staleness=np.array(staleness, dtype=np.int64))
        order = np.argsort([position[prompt_id] for prompt_id in ids], kind="stable")
        return StepBatch.from_rollouts(rollouts, scored, order, len(groups))

    def _score(self, rollouts: Pending, rows: int) -> Batch:
        if self._cfg.has_environment:
            summarize = bind_method(self._trainer.RG_ROLLOUT, "summarize", rows)
        else:
            summarize = bind_method(self._trainer.RG_REWARD, "score", rows)
        return Batch.concat(summarize(Shard(rollouts)))

    def _describe(self, groups: Sequence[Group]) -> Batch:
        numbers = {
            name: np.array([getattr(group, name) for group in groups], dtype=np.int64)
            for name in ("prompt_id", "created_step", "retry")
        }
        return self.prompts.select([group.row for group in groups]).with_columns(**numbers)

    def check_prompts(self) -> None:
        """Drop prompts that are too long if configured; raises DataError with the first 20 that the model cannot
        complete, before a step samples them."""
        data, places = self._cfg.data, self.prompts.places
        check = bind_method(self._trainer.RG_ROLLOUT, "check_prompts", len(places))
        faults = check(Shard(places), self.sampling, data.max_prompt_tokens)
        too_long = [error for _, part in faults for error in part]
        refused = too_long if data.over_long == "refuse" else []
        raise_errors([*(error for part, _ in faults for error in part), *refused])
        self.prompts.drop(too_long)

    def evaluate(self, step: int) -> StepBatch:
        """Answer the held-out prompts with the weights that were synced last, and score the answers."""
        evaluation = self._cfg.eval
        sampling = replace(self.sampling, temperature=evaluation.temperature, samples_per_prompt=evaluation.samples)
        seed, rows = Replicate((self._cfg.seed, step)), len(self.prompts.held_out)
        generate = bind_method(self._trainer.RG_ROLLOUT, "generate", rows)
        rollouts = generate(Shard(self.prompts.held_out), sampling, seed)
        scored = self._score(rollouts, rows)
        self.check_versions(step, scored)
        return StepBatch.from_rollouts(rollouts, scored, np.arange(len(scored)), rows)

    def collect_scores(self, evaluation: StepBatch) -> dict[str, Scores]:
        set_of_row = self.prompts.find_sets(evaluation.scored)
        rows = {name: np.flatnonzero(set_of_row == name).tolist() for name in self.prompts.eval_sets}
        samples = self._cfg.eval.samples
        return {name: collect_scores(evaluation.scored.take(numbers), samples) for name, numbers in rows.items()}
