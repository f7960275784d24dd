# SPDX-License-Identifier: Apache-2.0
"""The jobs and clusters of the simulation of masters."""

import json
from dataclasses import dataclass
from random import Random

LEASE_S, BEAT_S, HANG_S = 20.0, 0.5, 12.0


@dataclass(frozen=True)
class Terms:
    """A job and its cluster, and how its processes behave. The limits are numbers of restarts."""

    sizes: tuple[int, int, int] = (2, 2, 0)  # of actor, rollout and reward
    standbys: tuple[int, int] = (0, 1)
    limit: int = 999
    role_limit: int | None = None
    backoff_s: float = 0.5
    window_s: float = 3600.0
    node_limit: int = 999
    plan_nodes: int = 2
    nodes: int = 4
    rejoins: bool = False
    is_durable: bool = True
    echo: tuple[float, float] = (0.0, 0.0)  # the share of events that are reported once more, and the latest time

    def text(self, folder):
        trainer = f"module: toys, class: Loop, node_number: {self.plan_nodes}, device_per_node: 4, device_type: CPU"
        roles = zip(("actor", "rollout", "reward"), self.sizes, (*self.standbys, 0), strict=True)
        workload = "".join(
            f"  {role}: {{module: toys, class: Toy, num: {num}, per_node: {num if role == 'actor' else 1},"
            f" standby: {standby}, hang_after_s: {HANG_S}}}\n"
            for role, num, standby in roles
            if num
        )
        limits = {role: self.role_limit for role in ("actor", "rollout") if self.role_limit}
        return (
            f"name: sim\njob_dir: {folder}\ntrainer: {{{trainer}, hang_after_s: {HANG_S}}}\nworkload:\n{workload}"
            f"restart: {{job_max_restart: {self.limit}, trainer_max_restart: {self.limit}, window_s: {self.window_s},"
            f" node_max_failures: {self.node_limit}, backoff_s: {self.backoff_s},"
            f" workload_max_restart: {json.dumps(limits)}}}\n"
            f"liveness: {{beat_s: {BEAT_S}, lease_s: {LEASE_S}, start_timeout_s: 30}}\n"
        )


def random_terms(seed):
    rng = Random(seed)
    sizes = rng.randint(1, 3), rng.randint(1, 3), int(rng.random() < 0.3)
    standbys = rng.choice((0, 0, 1)), rng.choice((0, 1, 2))
    limit, role_limit = rng.choice(((2, None), (10, None), (10, 3), (999, 999), (999, 999), (999, 999)))
    plan_nodes = max(sizes[1], -(-(sum(sizes) + sum(standbys)) // 4))
    return Terms(
        sizes,
        standbys,
        limit,
        role_limit,
        backoff_s=rng.choice((0.0, 0.2, 0.5, 1.0)),
        window_s=rng.choice((30.0, 3600.0)),
        node_limit=rng.choice((2, 3, 4, 999)),
        plan_nodes=plan_nodes,
        nodes=plan_nodes + rng.randint(1, 2),
        rejoins=seed % 2 == 1,
        is_durable=rng.random() < 0.85,
        echo=(rng.choice((0.0, 0.1, 0.5)), rng.choice((0.1, 2.0, 8.0))),
    )
