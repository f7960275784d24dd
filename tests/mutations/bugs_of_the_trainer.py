# SPDX-License-Identifier: Apache-2.0
"""Bugs in calls and steps: what each worker gets, what a call gives, who raises what, and what begins again."""

from bug import Bug

_GROUP, _SHARD, _WORKLOAD, _PORT = (f"trainer/{name}.py" for name in ("role_group", "shard", "workload", "port"))
_TRAINER, _STEPS, _DURABLE = (f"trainer/{name}.py" for name in ("trainer", "steps", "durable"))
_TRANSFERS = "trainer/durable.py"

_CALLS = ("trainer/test_role_group.py", "trainer/test_shard.py", "trainer/test_workload.py")
_STEPPING = ("trainer/test_trainer.py", "trainer/test_durable.py")

TESTS = {
    _GROUP: _CALLS,
    _SHARD: _CALLS,
    _WORKLOAD: (*_CALLS, "trainer/test_trainer.py"),
    _PORT: (*_CALLS, "trainer/test_durable.py"),
    _TRAINER: ("trainer/test_trainer.py", "trainer/test_durable.py", "runtime/test_local_durable.py"),
    _STEPS: (*_STEPPING, "runtime/test_local_durable.py", "runtime/test_member_state.py"),
}

BUGS = {
    "a tuple of pre_func is one argument": Bug(
        _GROUP, "(changed if isinstance(changed, tuple) else (changed,)), {}", "(changed,), {}"
    ),
    "named arguments go around pre_func": Bug(
        _GROUP,
        "args, kwargs = (changed if isinstance(changed, tuple) else (changed,)), {}",
        "args = changed if isinstance(changed, tuple) else (changed,)",
    ),
    "rank 0 alone gets the item of a list": Bug(_GROUP, ' and self.settings.target == "ALL"', ""),
    "ranks of a replica are not consecutive": Bug(_GROUP, "*shard_args[rank // replica]", "*shard_args[rank % shards]"),
    "post_func is left out of pending results": Bug(
        _GROUP, "Pending(refs, replica, settings.post_func)", "Pending(refs, replica)"
    ),
    "every call has a deadline": Bug(_GROUP, "settings.timeout if settings.is_async else None)", "settings.timeout)"),
    "results are passed on without their post_func": Bug(_GROUP, " and pending.post_func is not None:", " and False:"),
    "calls of two threads are sent in another order than their numbers": Bug(
        _GROUP, "        with counter.lock:\n", "        if True:\n"
    ),
    "options for one call replace the method's": Bug(
        _GROUP, "self.settings.replace(**options)", "InvocationOptions().replace(**options)"
    ),
    "replicas of unequal size are taken": Bug(_GROUP, "if size < 1 or world_size % size:", "if size < 1:"),
    "what cannot be sent shows when others have begun": Bug(
        _GROUP, "if readers == 1 and _is_plain_data(value):", "if readers == 1:"
    ),
    "a tuple of one row for each is divided as a list": Bug(
        _SHARD, "if isinstance(value, list) and len(value) == shards:", "if len(value) == shards:"
    ),
    "too few chunks are divided over the workers": Bug(_SHARD, "    if len(parts) != shards:\n", "    if False:\n"),
    "columns of different lengths are divided": Bug(
        _SHARD, "    if len(set(lengths.values())) != 1:\n", "    if False:\n"
    ),
    "some workers get no rows": Bug(_SHARD, "    if rows < shards:\n", "    if rows < 1:\n"),
    "a row before the first is the last one": Bug(_SHARD, "if not 0 <= row < count]", "if not row < count]"),
    "chosen rows come in the order of their parts": Bug(
        _SHARD, "return _select(join(pieces), back)", "return join(pieces)"
    ),
    "the first row of a part is looked for in the part before": Bug(_SHARD, 'side="right") - 1', 'side="left") - 1'),
    "a named tuple is divided": Bug(_SHARD, 'return not hasattr(value, "_fields")', "return True"),
    "a deadline of no seconds is taken": Bug(_WORKLOAD, "if not self.timeout > 0:", "if self.timeout < 0:"),
    "every workload has state": Bug(
        _WORKLOAD, "return own is not None and own is not BaseWorkload.state_dict", "return own is not None"
    ),
    "a failure is raised once all others have answered": Bug(
        _PORT,
        "            if outcome.error is not None:\n                raise",
        "            if outcome.error is not None and not any(each.late for each in outcomes):\n                raise",
    ),
    "late ranks are among those that arrived": Bug(
        _PORT,
        "for ref, outcome in zip(refs, outcomes, strict=True) if not outcome.late}",
        "for ref, outcome in zip(refs, outcomes, strict=True)}",
    ),
    "wait() waits for the first rank of each replica": Bug(
        _PORT, "[ref.probe() for ref in self._refs]", "[ref.probe() for ref in self]"
    ),
    "result() gives one of each rank": Bug(
        _PORT, "gather(self._refs, timeout)[:: self._replica]", "gather(self._refs, timeout)"
    ),
    "damage that a worker finds is no damage": Bug(
        _PORT, "error.original if isinstance(error, InvocationError) else error", "error"
    ),
    "a nested pending result is sent": Bug(_PORT, "    def __reduce__(self)", "    def _reduce(self)"),
    "a workload's error that is retryable ends the job": Bug(
        _TRAINER, "for item in (error, original))", "for item in (error,))"
    ),
    "a trainer that exits is not told its end": Bug(_TRAINER, "except (Exception, SystemExit):", "except Exception:"),
    "an error of on_end hides why the run failed": Bug(
        _TRAINER, "except Exception:  # noqa: BLE001 -- the user's", "except ZeroDivisionError:  # the user's"
    ),
    "raw handles belong to lost workers": Bug(
        _TRAINER, "            self._actor_handles[RLRoleType(renewed.role)][rank] = handle\n", "            pass\n"
    ),
    "a repeated step does not say why": Bug(
        _TRAINER, "Attempt(attempt.number + 1, True, reason)", "Attempt(attempt.number + 1, True)"
    ),
    "workers answer from an attempt that was given up": Bug(
        _TRAINER, "            if attempt.number:\n                steps.forget()\n", ""
    ),
    "attempts do not count as restarts": Bug(_STEPS, "count=info.count + attempt.number", "count=info.count"),
    "calls after a loop that has nothing to do belong to a past step": Bug(
        _STEPS, "self.begin(max(ended, total) + 1)", "self.begin(total + 1)"
    ),
    "a step that is left is not committed by the next loop": Bug(
        _STEPS, "        self._commit_left_step()\n        ended", "        ended"
    ),
    "the trainer does not learn the last committed step": Bug(
        _STEPS, "        self.restart_info = replace(self.restart_info, step=committed)\n", ""
    ),
    "late workers can be replaced before steps()": Bug(
        _DURABLE,
        "        if not self.opened:\n            raise errors.CallError",
        "        if False:\n            raise errors.CallError",
    ),
    "a new worker is looked for on its old node": Bug(
        _TRANSFERS,
        "        self.locate({member: outcome.value for member, outcome in zip(new, outcomes, strict=True)})\n",
        "",
    ),
}
