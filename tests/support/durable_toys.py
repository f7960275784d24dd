# SPDX-License-Identifier: Apache-2.0
"""A small training job in one process that faults can be put into, call by call."""

import shutil
import threading
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.names import RLRoleType, member_name
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.sampler import PromptCursor
from dlrover.python.rl.runtime.checkpoint.commits import StoreCheckpoints, Stride
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.local import LocalHandle, LocalMember, LocalPort, LocalRecovery, process_environment
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.trainer.port import RestartInfo
from dlrover.python.rl.trainer.shard import Replicate, Shard
from dlrover.python.rl.trainer.trainer import BaseTrainer, TrainerLink, run_trainer
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext, trainer_invocation

PROMPTS = 8


class Policy(BaseWorkload):
    """Stateful; its ranks would meet in collectives."""

    needs_own_process = True

    def init_model(self, seed):
        self.weights = np.random.RandomState(seed + self.rank).standard_normal(4)
        self.momentum = np.zeros(4)
        self.noise = np.random.RandomState(99 + self.rank)
        self.updates = 0

    @trainer_invocation(blocking=False, target="RANK0")
    def publish(self):
        return {"weights": self.weights, "version": self.updates}

    def update(self, rollouts, rewards):
        gradient = (rollouts["x"] * rewards["reward"][:, None]).mean(axis=0) + 0.01 * self.noise.standard_normal(4)
        self.momentum = 0.9 * self.momentum + gradient
        self.weights += 0.1 * self.momentum  # in place: what was published before must not change with it
        self.updates += 1
        return float(np.abs(self.weights).sum())

    def state_dict(self):
        noise = self.noise.get_state(legacy=False)
        return {"weights": self.weights, "momentum": self.momentum, "noise": noise, "updates": self.updates}

    def load_state_dict(self, state):
        self.weights, self.momentum, self.updates = state["weights"], state["momentum"], state["updates"]
        self.noise.set_state(state["noise"])


class Sampler(BaseWorkload):
    """Stateless, but it serves nothing before it has weights."""

    def init_model(self):
        self.weights = None

    def receive(self, published):
        self.weights = published["weights"].copy()
        return published["version"]

    @trainer_invocation(blocking=False)
    def generate(self, prompts, seed):
        rows = [np.random.RandomState(hash((*seed, int(p))) % 2**31).standard_normal(4) * self.weights for p in prompts]
        return Batch({"x": np.array(rows), "prompt": np.array(prompts)})


class Judge(BaseWorkload):
    """Stateless."""

    floor = 0.0

    def init_judge(self, scale):
        self.scale = scale

    def mark_from(self, floor):
        self.floor = floor

    def score(self, rollouts):
        return Batch({"reward": np.tanh(rollouts["x"].sum(axis=1)) * self.scale + self.floor})


class AlonePolicy(Policy):
    """A policy whose ranks restart one by one."""

    needs_own_process = False


CLASSES = {"ACTOR": Policy, "ROLLOUT": Sampler, "REWARD": Judge}
ALONE = {**CLASSES, "ACTOR": AlonePolicy}


class Training(BaseTrainer):
    """Samples, judges, updates."""

    def init(self):
        self.state["cursor"] = PromptCursor(PROMPTS * 3, PROMPTS, seed=5)
        self.state["mean"] = 0.0
        self.RG_ACTOR.init_model(7)
        self.RG_ROLLOUT.init_model()
        self.RG_REWARD.init_judge.options(blocking=False)(0.5)

    def fit(self):
        self.RG_REWARD.mark_from(0.25)
        for step in self.steps(self.config["steps"]):
            self.body(step)
        self.config["end"].append((self.RG_ACTOR.publish().result()[0], self.state["mean"]))

    def body(self, step):
        (weights,) = self.RG_ACTOR.publish()
        self.RG_ROLLOUT.receive(Replicate(weights))
        rollouts = self.RG_ROLLOUT.generate(self.state["cursor"].next(), Replicate((3, step)))
        scored = Batch.concat(self.RG_REWARD.score(Shard(rollouts)))
        size = self.RG_ACTOR.update(Shard(rollouts), Shard(scored))
        self.state["mean"] = 0.9 * self.state["mean"] + float(scored["reward"].mean())
        self.log(step, size=sum(size), mean=self.state["mean"])


class Pipelined(Training):
    """A training that waits for as little as it can."""

    def body(self, step):
        (weights,) = self.RG_ACTOR.publish()
        self.RG_ROLLOUT.receive.options(blocking=False)(Replicate(weights))
        rollouts = self.RG_ROLLOUT.generate(self.state["cursor"].next(), Replicate((3, step)))
        rewards = self.RG_REWARD.score.options(blocking=False)(Shard(rollouts))
        size = self.RG_ACTOR.update.options(blocking=False)(Shard(rollouts), Shard(rewards))
        self.RG_ACTOR.publish()  # its result is not waited for
        scored = Batch.concat(rewards.result())
        self.state["mean"] = 0.9 * self.state["mean"] + float(scored["reward"].mean())
        self.log(step, size=sum(size.result()), mean=self.state["mean"])


class TrainerKilled(BaseException):
    """The trainer's process is gone."""


class Flaky(EngineError):
    """An error that says that trying again may help."""

    retryable = True


def wait_for_copies():
    """Copies in the background end before the next call, however slow the disk is: what a fault finds is the same in
    every run."""
    for thread in threading.enumerate():
        if thread.name.startswith("dlrover-copy-"):
            thread.join()


@dataclass
class FaultyPort(LocalPort):
    """Counts what is submitted, and lets something happen before or after one of the calls."""

    faults: dict = field(default_factory=dict)  # number of the call, and "before" or "after" it, to what happens then
    calls: list = field(default_factory=list)  # role, rank and method

    def submit(self, role, rank, call):
        number = len(self.calls)
        self.calls.append((str(role), rank, call.method))
        wait_for_copies()
        self.faults.pop((number, "before"), lambda stage: None)(self)
        ref = super().submit(role, rank, call)
        self.faults.pop((number, "after"), lambda stage: None)(self)
        return ref


def kill(role, rank):
    """A fault: a worker dies."""
    return lambda port: port.kill(role, rank)


def kill_trainer(port):
    """A fault: the trainer's process dies."""
    raise TrainerKilled


def both(*faults):
    """Several faults at once; the trainer's comes last."""

    return lambda port: [fault(port) for fault in faults]


class Stage:
    """A job that is run to its end through whatever faults.

    Args:
        nodes: the node of each worker and of ``"trainer"``, with its own memory. None: one for all.
        shared: whether commits go where every node sees them.
        spread: whether each node's are also in the memory of the next one.
    """

    collocation = ""

    def __init__(
        self, path, trainer=Training, steps=3, every=2, classes=CLASSES, nodes=None, shared=False, commit_every=1,
        spread=False, config=None, sizes=None,
    ):  # fmt: skip
        self.nodes, self.shared, self.spread = nodes, shared, spread
        self.path, self.trainer, self.classes = path, trainer, classes
        self.sizes, self.config = sizes or dict.fromkeys(classes, 2), config or {"steps": steps, "end": []}
        self.every, self.commit_every, self.epoch, self.logs = every, commit_every, 0, {}
        self.attempts, self.progress, self.on_opened = [], [], lambda: None
        members = {RLRoleType(role): [] for role in self.sizes}
        self.port = FaultyPort(members)
        for role, size in self.sizes.items():
            members[role] += [self.member(role, rank, 1) for rank in range(size)]

    def member(self, role, rank, incarnation, why=""):
        name, restart = member_name("job", "run1", role, rank, incarnation), RestartInfo(incarnation - 1, why)
        size, together = self.sizes[role], self.collocation
        context = MemberContext(name, RLRoleType(role), rank, size, collocation=together, restart=restart)
        host = MemberHost(incarnation, self.node((str(role), rank)))
        host.start(self.classes[role], context, None, self.config)
        env = self.memory((str(role), rank))
        return LocalMember(host, env, incarnation, self.classes[role].needs_own_process)

    def node(self, process):
        return self.nodes.get(process, "a") if self.nodes is not None else ""

    def memory(self, process):
        return {"DLROVER_RL_MEMORY": str(self.path / self.node(process))} if self.nodes is not None else {}

    def lose(self, node):
        """A fault: a node goes with all that was on it, and others take its place."""

        def strike(port):
            shutil.rmtree(self.path / node, ignore_errors=True)
            lost = [process for process, place in self.nodes.items() if place == node]
            self.nodes.update(dict.fromkeys(lost, f"{node}2"))
            for process in lost:
                if process != "trainer":
                    port.kill(*process)
            if "trainer" in lost:
                raise TrainerKilled

        return strike

    def roots(self):
        commits = self.path / "memory" if self.nodes is None else self.path / "commits" if self.shared else None
        node = self.node("trainer")
        return Roots("job", "run1", self.epoch, self.path / "durable", commits, node, self.shared)

    def link(self, fresh=True):
        self.epoch += 1
        restart = RestartInfo(self.epoch - 1, "killed" if self.epoch > 1 else "")
        noted = {"opened": lambda: self.on_opened(), "progressed": self.progress.append}
        recovery = LocalRecovery(self.port, self.member, self.epoch, fresh, restart, **noted)
        stride = Stride(self.commit_every)
        checkpoints = StoreCheckpoints(self.roots(), self.every, stride=stride, spread=self.spread)
        return TrainerLink(self.port, self.note, "job", self.path, recovery=recovery, checkpoints=checkpoints)

    def note(self, report):
        self.logs[report.step] = dict(report.metrics)

    def restarted_after(self):
        """The step that each trainer has begun after."""
        return [trainer.restart_info.step for trainer in self.attempts]

    def calls_of(self, role, method, rank=None):
        """The numbers of these calls."""
        calls = [(number, call) for number, call in enumerate(self.port.calls) if call[::2] == (role, method)]
        return [number for number, call in calls if rank in (None, call[1])]

    def make(self):
        sizes = {role: len(members) for role, members in self.port.members.items()}
        handles = {role: [LocalHandle(self.port, role, rank) for rank in range(size)] for role, size in sizes.items()}
        trainer = self.trainer(handles, self.classes, self.config)
        self.attempts.append(trainer)
        return trainer

    def run(self, faults=None, deaths=10):
        """Run it; a trainer that was killed is started again."""
        self.run_to_end(faults, deaths)
        return self.outcome()

    def run_to_end(self, faults, deaths):
        self.port.faults = dict(faults or {})
        for _ in range(deaths):
            with suppress(TrainerKilled), process_environment(self.memory("trainer")):
                return run_trainer(self.make, self.link(fresh=self.epoch == 0))
        raise AssertionError("the trainer never came to its end")

    def outcome(self):
        """Everything that must not depend on faults."""
        return plain({"end": self.config["end"][-1], "logs": self.logs, "members": self.states()})

    def states(self):
        alive = {process: member for process, member in self.members().items() if member.alive}
        return {f"{role}-{rank}": member.host.workload.state_dict() for (role, rank), member in alive.items()}

    def members(self):
        """The workers that are there now, by role and rank."""
        groups = self.port.members.items()
        return {(str(role), rank): member for role, members in groups for rank, member in enumerate(members)}

    def executed(self):
        """Count the executions of each method in the workers that are there now."""
        return {process: dict(member.host.executed) for process, member in self.members().items()}


def plain(value):
    """A comparable form, exact to the bit."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return value.hex() if isinstance(value, float) else value
