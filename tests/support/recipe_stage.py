# SPDX-License-Identifier: Apache-2.0
"""A recipe's job in one process, with its workers and its trainer killed at chosen calls."""

from dlrover.python.rl.common.names import RLRoleType
from tests.support import durable_toys


def flip_a_bit(actor, ticket, name):
    """Damage a tensor that an actor has published."""
    names = [entry.name for entry in ticket.table.entries]
    start, _ = ticket.table.spans()[names.index(name)]
    actor._weights._whole._versions._files[ticket.id]._data[start + 5] ^= 1


class Stage(durable_toys.Stage):
    """A job of ``roles``, each with its workload's class and its size, that is run to its end through faults."""

    def __init__(self, folder, trainer, roles, config, collocation=""):
        self.folder, self.roles, self.collocation, self._judges = folder, roles, collocation, []
        classes, sizes = ({role: pair[at] for role, pair in roles.items()} for at in (0, 1))
        super().__init__(folder, trainer, every=4, classes=classes, config=config, sizes=sizes)

    def member(self, role, rank, incarnation, why=""):
        member = super().member(role, rank, incarnation, why)
        if role == "REWARD":
            self._judges.append(member.host.workload)
        return member

    def run(self, faults=None):
        """Verifiers end here: a killed worker's process would have taken its own along."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            return self.run_to_end(faults, deaths=12)
        finally:
            for judge in self._judges:
                judge.close()

    def workload(self, role, rank=0):
        """The workload that is there now."""
        return self.port.members[RLRoleType(role)][rank].host.workload
