# SPDX-License-Identifier: Apache-2.0
"""Bugs in the master of a job, in its Ray executor, and in what they hold and watch of the cluster."""

from bug import Bug

_EXECUTOR, _PLACEMENT = "runtime/ray/executor.py", "runtime/ray/placement.py"
_NODES, _COMMITS, _HEAD = (
    "runtime/ray/cluster/nodes.py",
    "runtime/ray/cluster/api.py",
    "runtime/ray/cluster/cluster.py",
)
_CLUSTER, _MASTER, _BRAIN = "runtime/ray/cluster/api.py", "master/process/rl_master.py", "master/process/brain.py"
_HANGS = "master/process/hang_detector.py"
_STATUS = "master/process/status.py"

TESTS = {
    _NODES: ("runtime/ray/test_nodes.py", "runtime/ray/test_ray_executor.py"),
    _COMMITS: ("runtime/ray/test_cluster_api.py",),
    _HEAD: ("runtime/ray/test_own_cluster.py",),
    _BRAIN: ("master/test_brain.py", "master/test_local_run.py"),
    _MASTER: ("master/test_rl_master.py", "master/test_job_metrics.py"),
    _STATUS: ("master/test_brain.py",),
}

BUGS = {
    "a role with a least size ends the job for want of a place": Bug(
        _EXECUTOR,
        "if entry is not None and kind is ProcessKind.MEMBER and self.reservations.is_elastic(entry.role):",
        "if False:",
    ),
    "a standby without a place ends the job": Bug(
        _EXECUTOR, "            if entry is not None and kind is ProcessKind.STANDBY:\n", "            if False:\n"
    ),
    "a start that takes too long is a fault of the system": Bug(
        _EXECUTOR,
        "        if isinstance(error, TimeoutError):\n            cause",
        "        if False:\n            cause",
    ),
    "a node that was announced to go counts as lost": Bug(_NODES, "CauseKind.PREEMPTED)", "CauseKind.NODE_LOST)"),
    "a notice of a process is not taken": Bug(
        _EXECUTOR, "            self.nodes.take_notice(process.node, beat.notice)\n", "            pass\n"
    ),
    "a resized job has no secrets": Bug(
        _EXECUTOR, "        self._plan = replace(self._plan, job=unseal(self._plan.job, secrets))\n", ""
    ),
    "workers beyond a smaller size stay": Bug(
        _EXECUTOR,
        "                self._discard(process_id)\n                self._detached",
        "                self._detached",
    ),
    "a rank that never came up keeps its process": Bug(
        _EXECUTOR, "if former is not None and former.up:", "if former is not None:"
    ),
    "an actor whose start was cancelled stays": Bug(
        _EXECUTOR, "self._detached.run(self._pool.end_once_started(self._pool.name_of(entry)))", "pass"
    ),
    "a process that does not leave stays beside its successor": Bug(
        _EXECUTOR, "            self._detached.run(self._pool.end(entry.former))\n", ""
    ),
    "a new worker thinks that the open step is committed": Bug(
        _EXECUTOR, "max(self.open_step - 1, 0)", "self.open_step"
    ),
    "the reason of an earlier loss is given again": Bug(
        _EXECUTOR, 'self.last_causes.pop(process_id, "other', 'self.last_causes.get(process_id, "other'
    ),
    "a late kill ends the replacement": Bug(
        _EXECUTOR, "if entry is not None and entry.number == number:", "if entry is not None:"
    ),
    "a restart forgets the commits": Bug(_EXECUTOR, "        if command.final:\n", "        if True:\n"),
    "the nodes of adopted processes are not watched": Bug(
        _EXECUTOR,
        "            if entry.process is not None:\n                self.reservations.nodes.add(entry.process.node)\n",
        "",
    ),
    "a job ends rather than use an excluded node": Bug(
        _PLACEMENT,
        "            self._readmit(excluded, error)\n            await asyncio.to_thread(remove_groups",
        "            raise\n            await asyncio.to_thread(remove_groups",
    ),
    "the trainer's node may lack": Bug(_PLACEMENT, "        needed = {0}\n", "        needed = set()\n"),
    "places beyond the plan stay after the master's return": Bug(
        _PLACEMENT,
        "            await asyncio.to_thread(release_beyond, self._cluster, prefix, len(self._groups))\n",
        "",
    ),
    "places that came too late for a resize stay": Bug(
        _PLACEMENT,
        "            await asyncio.to_thread(release_beyond, self._cluster, prefix, len(former))\n",
        "",
    ),
    "a resize in the middle of a restart adds to its groups": Bug(
        _PLACEMENT, "if self._groups is not former:", "if False:"
    ),
    "commits are removed under living processes": Bug(
        _PLACEMENT,
        "            pids.setdefault(process.node, []).append(process.pid)\n",
        "            pids.setdefault(process.node, [])\n",
    ),
    "a master without a journal leaves commits in memory": Bug(
        _PLACEMENT,
        "self.nodes or {row.node_id for row in await asyncio.to_thread(self._cluster.list_nodes) if row.alive}",
        "self.nodes",
    ),
    "a master that is back ends workers on excluded nodes": Bug(
        _PLACEMENT, "if group.is_reserved()), prefix)", "if group.is_reserved(excluded)), prefix)"
    ),
    "free memory is compared in bytes with megabytes": Bug(
        _PLACEMENT, 'amount / MEGABYTE if name == "memory" else amount for', "amount for"
    ),
    "a group that was replaced follows to another node": Bug(
        _PLACEMENT, "group.state == CREATED and group.nodes == {successor.replaced_node}", "group.state == CREATED"
    ),
    "the only node is left when it is drained": Bug(
        _NODES, "elif row.node_id in leaving and is_refuge:", "elif row.node_id in leaving:"
    ),
    "a commit is given up while its node may still have it": Bug(
        _COMMITS, "        if None in saved:\n", "        if False:\n"
    ),
    "the oldest commit of a lost memory is saved": Bug(_COMMITS, ".items(), reverse=True):", ".items()):"),
    "processes write while their commits are listed": Bug(_COMMITS, "    kill_and_wait(pids)\n", ""),
    "a GCS that dies now and then is given up": Bug(
        _HEAD, "in_a_row + 1 if time.monotonic() - last_s < self._quiet_s else 1", "in_a_row + 1"
    ),
    "the folder of a running cluster is removed": Bug(
        _HEAD,
        "                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                _remove(folder)",
        "                _remove(folder)",
    ),
    "a replaced master runs functions on nodes": Bug(_CLUSTER, '"remove_group", "run_on"', '"remove_group"'),
    "a job that has ended reserves again when its master is back": Bug(
        _MASTER,
        "        if state.phase.terminal:\n            self._leave()  # nothing",
        "        if False:\n            self._leave()  # nothing",
    ),
    "a master that was replaced stays": Bug(
        _MASTER,
        'leave(f"another process of this master has taken over: {error}")  # the other one',
        "pass  # the other one",
    ),
    "a process that hangs is not killed": Bug(
        _MASTER, "            self._spawn(kill_process(self._cluster, condemned))\n", "            pass\n"
    ),
    "a new worker does not know why the last one was lost": Bug(
        _MASTER, "        if isinstance(event, MemberLost) and after is not before:\n", "        if False:\n"
    ),
    "workers do not learn that a peer is lost": Bug(
        _MASTER, "        if has_lost_peer(beat, self._state):\n", "        if False:\n"
    ),
    "a master whose journal is gone waits for ever": Bug(_MASTER, "if error := self._run.miss_journal():", "if False:"),
    "a replaced trainer gets replacements": Bug(
        _MASTER, "        if epoch < self._state.epoch:\n", "        if False:\n"
    ),
    "a link that fails is the fault of the rank that says so": Bug(
        _MASTER, "if cause.kind is CauseKind.LINK_FAILED and self", "if False and self"
    ),
    "a worker that the trainer finds dead has not run out of memory": Bug(
        _MASTER,
        "            cause = self._executor.nodes.oom_kills.explain(ProcessId(role, rank), member.process, cause)\n",
        "",
    ),
    "a master that has the secrets still asks for them": Bug(
        _MASTER, "        self.lacking = hidden_in(self.job)\n", ""
    ),
    "a master that falls leaves commits in memory": Bug(
        _MASTER, "Release(state.incarnation, final=True)", "Release(state.incarnation, final=False)"
    ),
    "a decision that could not be saved is taken": Bug(
        _BRAIN,
        "        if lines:\n            self.store.append(*lines)\n        self.state = state\n",
        "        self.state = state\n        if lines:\n            self.store.append(*lines)\n",
    ),
    "a resumed run has the numbers of its first processes again": Bug(
        _BRAIN, "    return 1 + last\n", "    return 1\n"
    ),
    "a second journal of a folder replaces the first": Bug(
        _BRAIN, "{1 + _newest_kept(job)}.jsonl", "{_newest_kept(job) or 1}.jsonl"
    ),
    "a constructor that takes long hangs": Bug(_HANGS, " or beat.method == CONSTRUCTING:", ":"),
    "a resize that a restart has undone was done": Bug(
        _MASTER, "        if len(ranks_of(self._state, role)) != num:\n", "        if False:\n"
    ),
    "one who follows a long job gets old reports": Bug(_MASTER, "max(count - dropped, 0)", "count"),
    "metrics of a master that is back begin at 0": Bug(_MASTER, "        if resumed:\n", "        if False:\n"),
    "a standby that takes over is shown twice": Bug(_STATUS, "            if process_id not in taking\n", ""),
    "a run that was taken over by another run ends silently": Bug(
        _MASTER, "if owner is not None and owner.run == self.job.run:", "if owner is not None:"
    ),
    "a master that cannot begin keeps the folder": Bug(_MASTER, "            self.leave(run_folder.FAILED)\n", ""),
    "an event that orders something is not written down": Bug(
        _BRAIN, "if after is not before]", "if after is not before and not commands]"
    ),
}
