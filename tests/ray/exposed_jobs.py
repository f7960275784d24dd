# SPDX-License-Identifier: Apache-2.0
"""A job whose two ranks form a process group and sync weights by a broadcast, then stay: for who looks at its ports."""

import time
from pathlib import Path

import torch

from dlrover.python.rl.engine.api.base import Rendezvous
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.weight_sync.base import SyncSettings
from dlrover.python.rl.engine.weight_sync.collective import BroadcastTransport
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload


class Ones:
    version = 1

    def named_weights(self):
        yield "weight", torch.ones(1000)


class Ranked(BaseWorkload):
    """Rank 0 sends, rank 1 receives."""

    def meet(self):
        address, port = self.torch_master_addr, self.torch_master_port
        ranks = Ranks.connect(Rendezvous(self.rank, self.world_size, address, port, timeout_s=60.0))
        self.transport = BroadcastTransport(SyncSettings(is_leader=self.rank == 0, address=address))
        assert ranks.gather(self.rank) == [0, 1]
        return self.transport.offer(Ones())

    def sync(self, ticket):
        if self.rank == 0:
            self.transport.send(ticket, Ones())
        else:
            assert self.transport.receive(ticket).tensor("weight").sum() == 1000
        return self.torch_master_port


class MeetingTrainer(BaseTrainer):
    def init(self):
        self.ticket = self.RG_ACTOR.meet()[0]

    def fit(self):
        for _ in self.steps(1):
            ports = (self.RG_ACTOR.sync(self.ticket)[0], self.ticket.address["tcp_port"])
            Path(f"{self.config.notes}.new").write_text("\n".join(map(str, ports)))
            Path(f"{self.config.notes}.new").rename(self.config.notes)
            time.sleep(600)


def job_text(notes, port):
    return f"""
trainer:
  module: tests.ray.exposed_jobs
  class: MeetingTrainer
  device_type: CPU
  device_per_node: 2
  torch_master_port: [{port}]
workload:
  actor: {{module: tests.ray.exposed_jobs, class: Ranked, num: 2}}
config: {{notes: {notes}}}
"""
