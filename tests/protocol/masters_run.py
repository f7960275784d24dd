# SPDX-License-Identifier: Apache-2.0
"""One seed of the simulation of masters: faults at random, then quiet, in which the job must finish."""

from functools import partial

from tests.protocol.loops_world import Violation, World, silence, simulated_disk
from tests.protocol.masters_disk import TRANSIENT
from tests.protocol.masters_job import Job
from tests.protocol.masters_terms import LEASE_S, random_terms


def _is_trainer(name):
    return "/trainer/" in name


_TO_PROCESSES = {
    "worker dies": (lambda name: not _is_trainer(name) and "standby" not in name, "die"),
    "worker hangs": (lambda name: not _is_trainer(name), "stick"),
    "worker stops": (lambda name: not _is_trainer(name), "stop"),
    "standby dies": (lambda name: "standby" in name, "die"),
    "trainer dies": (_is_trainer, "die"),
    "trainer hangs": (_is_trainer, "stick"),
    "trainer stops": (_is_trainer, "stop"),
}
OF_PROCESSES = tuple(_TO_PROCESSES)
OF_TRAINER = OF_PROCESSES[-3:]
REPLACING = ("master is replaced while it is frozen", "master is replaced while it is cut off")
OF_MASTERS = (
    "master dies",
    "master freezes",
    *REPLACING,
    "master dies in a write",
    "power fails",
    "power fails in a write",
)
OF_CLUSTER = (
    "node is lost",
    "node is cut off",
    "journal's disk is full",
    "journal's disk falters",
    "everything is slow",
    "Ray's head is away",
)
FAULTS = (*OF_PROCESSES, *OF_MASTERS, *OF_CLUSTER)
RARE = ("user's code fails", "job is stopped")

_ALWAYS = (*OF_CLUSTER, *OF_MASTERS, "job is stopped")
SITUATIONS = {
    "created": _ALWAYS,
    "placed": (*_ALWAYS, *(fault for fault in OF_PROCESSES if fault not in OF_TRAINER)),
    "opening": (*_ALWAYS, *OF_PROCESSES, "user's code fails"),
    "stepping": (*_ALWAYS, *OF_PROCESSES, "user's code fails"),
    "recovering": (*_ALWAYS, *OF_PROCESSES, "user's code fails"),
    "restarting": _ALWAYS,
    "ending": _ALWAYS,
    "away": (*OF_PROCESSES, *OF_CLUSTER, "user's code fails"),
}
"""Situation of a job to the faults that can meet it."""

PAIRS = [(situation, fault) for situation, faults in SITUATIONS.items() for fault in faults]
_STRIDE, _IN_WAIT = 29, 4  # of a seed's pairs, and how many they are
_LEADS_TO = {
    "restarting": ("opening", "trainer dies"),
    "away": ("stepping", "master dies"),
    "recovering": ("stepping", "worker dies"),
}
_FAULTY_S, _QUIET_S = 60.0, 900.0


class Faults:
    """Strike at random times; some lie in wait for a situation of the job, which a seed decides about."""

    def __init__(self, job: Job) -> None:
        self.job, self.world, self.rng, self.cluster = job, job.world, job.world.rng, job.cluster
        self.until_s = self.world.now_s + _FAULTY_S
        self.kinds = [*self.rng.sample(FAULTS, self.rng.randint(4, len(FAULTS))), *REPLACING]
        if self.rng.random() < 0.1:
            self.kinds.append(self.rng.choice(RARE))
        first = _IN_WAIT * job.world.seed
        self.in_wait = [PAIRS[(first + more) * _STRIDE % len(PAIRS)] for more in range(_IN_WAIT)]
        self.in_wait += [_LEADS_TO[situation] for situation, _ in self.in_wait if situation in _LEADS_TO]
        job.entered = self.spring
        self._acts = {
            **{fault: partial(self._do, *act) for fault, act in _TO_PROCESSES.items()},
            "master dies": self._kill_master,
            "master freezes": lambda: self._freeze(self.rng.choice((0.3, 3.0, 15.0)) * self.rng.random()),
            "master is replaced while it is frozen": self._replace_frozen,
            "master is replaced while it is cut off": job.start_master,
            "master dies in a write": lambda: self._kill_in_write(power_too=False),
            "power fails": job.cut_power,
            "power fails in a write": lambda: self._kill_in_write(power_too=True),
            "node is lost": lambda: self._do_to_node(self.cluster.lose_node),
            "node is cut off": lambda: self._do_to_node(self._cut_off),
            "journal's disk is full": self._fill_disk,
            "journal's disk falters": self._let_disk_falter,
            "everything is slow": lambda: self._for_a_while(self.world, "slowness", 50.0, 1.0),
            "Ray's head is away": lambda: self._for_a_while(self.cluster, "is_away", True, False),
            "user's code fails": self._fail_user,
            "job is stopped": self._stop,
        }

    def strike_on(self):
        """Strike, and later again."""
        if self.is_over():
            return
        self.strike(self._any())
        if self.rng.random() < 0.4:  # in the middle of what the first one has set off
            self.world.after(0.03 * self.rng.random(), lambda: self.strike(self._any()))
        self.world.after(self.rng.choice((0.05, 0.5, 2.0, 8.0)) * self.rng.random() * 2, self.strike_on)

    def _any(self):
        """Choose a fault; in a restart of the job often the trainer's, which is up for a short part of it."""
        is_restarting = self.job.situation == "restarting" and self.rng.random() < 0.5
        return self.rng.choice(OF_TRAINER if is_restarting else self.kinds)

    def is_over(self):
        return self.world.now_s > self.until_s or self.job.is_over()

    def spring(self, situation):
        """The job has come into a situation."""
        for pair in [pair for pair in self.in_wait if pair[0] == situation]:
            if self.strike(pair[1]):
                self.in_wait.remove(pair)

    def strike(self, fault):
        is_late = self.is_over() and (self.job.is_over() or self.job.situation != "ending")
        is_served = self.cluster.master is self.job.master and not self.job.master.is_dead
        if is_late or (fault in OF_MASTERS and not is_served):
            return False
        situation = self.job.situation
        if self._acts[fault]() is False:
            return False
        self.world.trace("FAULT", fault, "in", situation)
        self.world.reached[f"{fault} / {situation}"] += 1
        return True

    def heal(self):
        """End all faults."""
        self.job.disk.heal()
        self.job.is_quiet = True

    def _do(self, matches, method):
        actors = [actor for name, actor in sorted(self.cluster.actors.items()) if matches(name)]
        if not actors:
            return False
        actor = self.rng.choice(actors)
        self.world.trace("fault at", actor.name)
        getattr(actor, method)()
        return True

    def _kill_master(self):
        self.job.master.kill()
        self.job.restart_master_later()

    def _freeze(self, seconds):
        self.job.master.thaws_s = self.world.now_s + seconds

    def _replace_frozen(self):
        self._freeze(self.rng.uniform(0.5, 25.0))
        self.job.restart_master_later()

    def _kill_in_write(self, power_too):
        self.job.power_too = power_too
        self.job.disk.kill_in = self.rng.randint(1, 4)

    def _do_to_node(self, act):
        used = sorted({actor.node for actor in self.cluster.actors.values()} - self.cluster.cut_off.keys())
        used = used or sorted(self.cluster.nodes.keys() - self.cluster.cut_off.keys())
        nodes = [node for node in used if self.cluster.nodes.get(node)]
        if not nodes:
            return False
        act(self.rng.choice(nodes))
        return True

    def _cut_off(self, node):
        self.cluster.cut_node_off(node, self.rng.uniform(0.5, 20.0))

    def _fill_disk(self):
        self._for_a_while(self.job.disk, "room", self.rng.randint(0, 300), None)

    def _let_disk_falter(self):
        self.job.disk.falter(self.rng.choice(TRANSIENT))
        self._for_a_while(self.job.disk, "failing", self.job.disk.failing, None)

    def _for_a_while(self, owner, name, value, usual):
        setattr(owner, name, value)
        self.world.after(self.rng.uniform(0.2, 6.0), lambda: setattr(owner, name, usual))

    def _fail_user(self):
        trainers = [actor for name, actor in self.cluster.actors.items() if _is_trainer(name)]
        for trainer in trainers:
            trainer.is_failing = self.job.is_failing = True
        return bool(trainers)

    def _stop(self):
        self.job.is_stopped = True
        self.cluster.ask_master("stop", ("enough",), lambda answer, error: None)


def run(seed: int) -> World:
    """Simulate one job; returns its world. Raises Violation, with the trace as ``lines``."""
    world = World(seed)
    with silence(), simulated_disk() as folder:
        job = Job(world, folder, random_terms(seed))
        try:
            play(job)
        except Exception as error:
            error.add_note(f"seed {seed}: python -m tests.protocol.replay_protocol masters {seed}")
            error.lines = world.lines
            raise
        finally:
            job.close()
            world.close()
    return world


def play(job: Job) -> None:
    """Faults, and then none, until the job has finished and nothing of it is left."""
    with job.environment():
        rng = job.world.rng
        job.begin()
        faults = Faults(job)
        job.world.after(rng.choice((1.5, 3.0, 10.0)) * rng.random(), faults.strike_on)
        job.world.after(_FAULTY_S, faults.heal)
        job.world.run(job.is_over, _FAULTY_S + _QUIET_S)
        job.check_end()
        # A master that was replaced before it did anything ends after five minutes. Faults may still replace one.
        job.world.run(lambda: not (job.left_over() or job.cluster.cut_off), _FAULTY_S + 300.0 + 3 * LEASE_S)
        if job.left_over() or job.state() != job.referee.last:
            raise Violation("a job that has ended has changed")
