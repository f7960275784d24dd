# SPDX-License-Identifier: Apache-2.0
"""Bugs in the loop that learns from samples: which are taken, what they count for, and by which weights they are."""

from bug import Bug

_ONLINE = "recipe/online"
_BATCH, _COLLECTOR, _PROMPTS = f"{_ONLINE}/batch.py", f"{_ONLINE}/collector.py", f"{_ONLINE}/prompts.py"
_TRAINER, _UPDATES = "recipe/trainers/policy_trainer.py", "recipe/base/updates.py"
_REWARDS, _PLAN = "recipe/reporting/rewards.py", "recipe/trainers/policy_plan.py"
_COLUMNS = "data/batch.py"

TESTS = {
    _BATCH: (
        "recipe/trainers/test_policy_trainer.py",
        "recipe/reporting/test_reward_figures.py",
        "recipe/online/test_collector.py",
    ),
    _REWARDS: ("recipe/trainers/test_policy_trainer.py", "recipe/reporting/test_reward_figures.py"),
    _UPDATES: ("recipe/base/test_updates.py",),
    _COLUMNS: ("environment/test_turns.py",),
    _COLLECTOR: ("recipe/online/test_collector.py",),
    _PROMPTS: ("recipe/online/test_prompt_source.py",),
    _TRAINER: ("recipe/trainers/test_policy_trainer.py",),
    _PLAN: ("recipe/trainers/test_policy_trainer.py",),
}

BUGS = {
    "columns of an engine are filled with zeros": Bug(
        _COLUMNS, "self.fill, self.dtype) if self.shape else self.fill", "0, self.dtype) if self.shape else 0"
    ),
    "a column per sample has its first value": Bug(
        _COLUMNS, "self.values[name] = added", "self.values[name] = self.values[name] or added"
    ),
    "an engine may give a column that it does not declare": Bug(
        _COLUMNS, "if not names.keys() <= self.specs.keys():", "if False:"
    ),
    "an engine may leave a column out": Bug(
        _COLUMNS, "len(values.get(name, ())) != count:", "name in values and len(values[name]) != count:"
    ),
    "rows of later parts are the ones in the first": Bug(
        _BATCH,
        "tuple(start + row for start, part in placed for row in part.rows)",
        "tuple(row for _, part in placed for row in part.rows)",
    ),
    "filtered rows of later parts are the ones in the first": Bug(
        _BATCH,
        "start + row for start, part in placed for row in part.filtered_rows",
        "row for _, part in placed for row in part.filtered_rows",
    ),
    "a filtered group counts as collected": Bug(_BATCH, "            groups=len(np.unique(ids[is_varied])),\n", ""),
    "groups filtered before are forgotten": Bug(
        _BATCH, "filtered=(*self.filtered, self.scored.take(uniform)),", "filtered=(self.scored.take(uniform),),"
    ),
    "a failure before the last retry counts": Bug(
        _REWARDS, "ids[(retry == last[group]) & is_unscored(scored)]", "ids[is_unscored(scored)]"
    ),
    "steps without a reward are counted in all": Bug(
        _REWARDS,
        "self._steps + 1 if np.isnan(trainable_rewards(scored, self._config)).all() else 0",
        "self._steps + bool(np.isnan(trainable_rewards(scored, self._config)).all())",
    ),
    "a run continues for one step more without a reward": Bug(
        _REWARDS, "if step == 1 or self._steps >= limit:", "if step == 1 or self._steps > limit:"
    ),
    "a first step without a reward is passed over": Bug(
        _REWARDS, "if step == 1 or self._steps >= limit:", "if self._steps >= most:"
    ),
    "a group of one sample has no gradient": Bug(_REWARDS, "if len(group) > 1]", "if len(group) > 0]"),
    "the other samples of a failed one are trained on": Bug(
        _REWARDS, "reward[has_failure[group]] = np.nan", "reward[is_unscored(scored)] = np.nan"
    ),
    "a failure of an earlier try takes the retry's rewards": Bug(
        _REWARDS,
        'np.stack([scored.dense("prompt_id"), scored.dense("retry")])',
        'np.stack([scored.dense("prompt_id")])',
    ),
    "any error of an update names samples": Bug(
        _UPDATES, "if not isinstance(error.original, NonFiniteUpdate):", "if not isinstance(error.original, Exception):"
    ),
    "an infinity is finite": Bug(_UPDATES, "~np.isfinite(column).reshape", "np.isnan(column).reshape"),
    "one NaN in a row is passed over": Bug(
        _UPDATES, "np.array([bool(row.any()) for row", "np.array([bool(row.all()) for row"
    ),
    "unscored samples count in the mean length": Bug(
        _REWARDS,
        "has_completion = (tokens > 0) | ~np.isnan(rewards)",
        "has_completion = np.ones(len(tokens), dtype=bool)",
    ),
    "truncated is finished": Bug(_REWARDS, "1.0 - finished.mean()", "finished.mean()"),
    "more groups are open than the bound": Bug(
        _COLLECTOR, "min(self.max_staleness + 1, remaining_steps)", "min(self.max_staleness + 2, remaining_steps)"
    ),
    "groups are requested that no step takes": Bug(
        _COLLECTOR, "min(self.max_staleness + 1, remaining_steps)", "(self.max_staleness + 1)"
    ),
    "two groups of a step have an id": Bug(_COLLECTOR, "used = self._step_ids | {", "used = {"),
    "groups of one request have an id": Bug(_COLLECTOR, "            used.add(prompt_id)\n", ""),
    "a group that has started moves": Bug(
        _COLLECTOR,
        "            if not group.started:\n                group.share",
        "            if not group.complete:\n                group.share",
    ),
    "complete groups are a load": Bug(_COLLECTOR, "group.started and not group.complete", "group.started"),
    "a run that went back remembers later versions": Bug(
        _COLLECTOR, "[served for served in self._versions if served < version]", "list(self._versions)"
    ),
    "a version too old to be remembered is young": Bug(
        _COLLECTOR, "            return self.max_staleness + 1\n", "            return 0\n"
    ),
    "the freshest groups are taken": Bug(
        _COLLECTOR, "key=lambda group: -self.staleness(", "key=lambda group: self.staleness("
    ),
    "a step takes groups that leave others late": Bug(
        _COLLECTOR, "group.started and group.key not in keys]", "group.started and group.key in keys]"
    ),
    "one late group is one too few": Bug(
        _COLLECTOR, "> steps * self.groups_per_step", "> (steps + 1) * self.groups_per_step"
    ),
    "a group that was started is lost with its share": Bug(
        _COLLECTOR,
        "                group.share, group.started = share, started\n",
        "                group.share = share\n",
    ),
    "rollouts with other weights continue": Bug(
        _COLLECTOR, "        if stamp != published:\n", "        if stamp.version != published.version:\n"
    ),
    "tokens of weights that were not synced are taken": Bug(
        _COLLECTOR, "if version > self._synced.version or self", "if self"
    ),
    "a group is sampled again without end": Bug(_COLLECTOR, " and each.retry < reward.max_redraws]", "]"),
    "a step is not refilled": Bug(_COLLECTOR, "for _ in range(1 + refills):", "for _ in range(max(1, refills)):"),
    "a retry counts as another group": Bug(
        _COLLECTOR, "replace(self._fetch(step, groups), groups=0)", "self._fetch(step, groups)"
    ),
    "samples are in the order of the workers": Bug(
        _COLLECTOR, 'np.argsort([position[prompt_id] for prompt_id in ids], kind="stable")', "np.arange(len(ids))"
    ),
    "prompts that are too long are refused when they are to be dropped": Bug(
        _COLLECTOR, 'too_long if data.over_long == "refuse" else []', "too_long"
    ),
    "a dropped prompt is trained on": Bug(_PROMPTS, "[row for row in train if row not in out]", "list(train)"),
    "a dropped prompt is evaluated on": Bug(
        _PROMPTS, "enumerate(numbers_held) if number not in out]", "enumerate(numbers_held)]"
    ),
    "a set without prompts is evaluated on": Bug(
        _PROMPTS, '{"train": self._train, **sets}.items():', '{"train": self._train}.items():'
    ),
    "another limit of prompts goes unnoticed": Bug(_PROMPTS, 'if state["over_long"] != self._limit:', "if False:"),
    "changed sets go unnoticed": Bug(_PROMPTS, "if digests.get(name) != digest}", "if digests.get(name) is None}"),
    "dropped prompts come back after a resumption": Bug(
        _PROMPTS, "if not is_other or row < self._first_held]", "if row < self._first_held]"
    ),
    "the last row of a set is in the next one": Bug(_PROMPTS, 'side="right") - 1]', 'side="left") - 1]'),
    "a file that is left unread is read": Bug(
        _PROMPTS,
        "if is_left_unread(path):",
        "if not path:",
    ),
    "a step with no sample to train on is an update": Bug(
        _TRAINER, "if not rewards.is_unscored(batch.train_rows).all():", "if True:"
    ),
    "a metric of an update has two names": Bug(_TRAINER, 'or "/" in name else', "else"),
    "an evaluation that is not a number may be the best": Bug(
        _TRAINER, "if not any(map(math.isnan, evaluation.values())):", "if True:"
    ),
    "another vocabulary goes unnoticed": Bug(_TRAINER, 'if mark != marks["actor"]:', "if not mark:"),
    "rollouts that may be stale go uncorrected": Bug(_PLAN, "if (differs or stale) and", "if differs and"),
    "samples of an earlier attempt stay": Bug(
        _BATCH, "step, self._end)\n\n    def write_step", "step + 1, self._end)\n\n    def write_step"
    ),
    "the first step without signal is logged again and again": Bug(
        _REWARDS, "if self._without_signal.bit_count() == 1:", "if True:"
    ),
    "each step with truncated completions is logged": Bug(
        _REWARDS, "if share > _MAX_TRUNCATED and self._had_room:", "if share > _MAX_TRUNCATED:"
    ),
}
