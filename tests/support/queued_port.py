# SPDX-License-Identifier: Apache-2.0
"""Workers that run their calls later, in an order of chance, and die of chance: a cluster in one thread."""

from collections import deque
from dataclasses import dataclass, field
from random import Random

from dlrover.python.rl.common.errors import InvocationError, ResultLost
from dlrover.python.rl.runtime.local import CallResult
from dlrover.python.rl.trainer.port import Outcome, Ref
from dlrover.python.rl.trainer.shard import Rows
from tests.support.durable_toys import FaultyPort, TrainerKilled


@dataclass(eq=False)
class Ticket:
    """A call that was submitted; ``done`` is what came of it."""

    member: object
    role: str
    rank: int
    call: object
    done: object = None


@dataclass
class QueuedPort(FaultyPort):
    """Each worker has a queue and runs its calls in order; which worker comes next is chance.

    Attributes:
        random: the source of chance.
        death_rate: of a worker, at each turn.
        trainer_death_rate: of the trainer, at each submit and each wait.
    """

    random: Random = field(default_factory=Random)
    death_rate: float = 0.0
    trainer_death_rate: float = 0.0
    queues: dict = field(default_factory=dict)
    deaths: list = field(default_factory=list)
    results: dict = field(default_factory=dict)

    def submit(self, role, rank, call):
        self.calls.append((str(role), rank, call.method))
        self._trainer_may_die()
        member = self.members[role][rank]
        ticket = Ticket(member, str(role), rank, call)
        self.queues.setdefault((str(role), rank, member.incarnation), deque()).append(ticket)
        return Ref(self, ticket, ticket, role, rank, call.method, member.incarnation)

    def wait(self, refs, timeout_s):
        tickets = [ref.token for ref in refs if isinstance(ref.token, Ticket)]
        if timeout_s != 0:
            self._trainer_may_die()
        while timeout_s != 0 and not self._decided(tickets) and self._turn():
            pass
        return [self._outcome(ref) for ref in refs]

    def _decided(self, tickets):
        done = [ticket.done for ticket in tickets]
        return all(item is not None for item in done) or any(item is not None and item.error for item in done)

    def _outcome(self, ref):
        if not isinstance(ref.token, Ticket):
            return ref.token.outcome(None)
        return Outcome(late=True) if ref.token.done is None else ref.token.done.outcome(None)

    def _trainer_may_die(self):
        if self.random.random() < self.trainer_death_rate:
            self.deaths.append("trainer")
            raise TrainerKilled

    def _turn(self):
        """Let one worker run its next call, or die. False if there is nothing to do."""
        ready = [queue for queue in self.queues.values() if queue and self._is_ready(queue[0])]
        if not ready:
            return False
        if self.random.random() < self.death_rate:
            role = self.random.choice(sorted(self.members))
            self.die(str(role), self.random.randrange(len(self.members[role])))
            return True
        ticket = self.random.choice(ready).popleft()
        self._run_ticket(ticket)
        return True

    def die(self, role, rank):
        """A worker dies; with some luck its results stay where others can take them."""
        member = self.members[role][rank]
        if not member.alive:
            return
        self.deaths.append(f"{role}[{rank}]")
        self.kill(role, rank)
        if self.random.random() < 0.3:
            for ticket in self.results.pop((role, rank), []):
                lost = ResultLost("its node is gone", role=role, rank=rank, method=ticket.call.method)
                ticket.done = CallResult(None, lost)

    def _run_ticket(self, ticket):
        sibling_died = ticket.member.together and any(not other.alive for other in self.members[ticket.role])
        if ticket.member.alive and sibling_died and ticket.call.method == "update":
            echo = InvocationError("reset by peer", role=ticket.role, rank=ticket.rank, method=ticket.call.method)
            ticket.done = CallResult(None, echo)
            return
        ticket.done = self.execute(ticket.member, ticket.role, ticket.rank, ticket.call)
        if ticket.done.result is not None:
            self.results.setdefault((ticket.role, ticket.rank), []).append(ticket)

    def _is_ready(self, ticket):
        if not ticket.member.alive:
            return True
        return all(ref.token.done is not None for ref in _tickets(ticket.call))

    def _resolve(self, value):
        return super()._resolve(_settled(value))


def _refs(value):
    items = value.parts if isinstance(value, Rows) else value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, Ref)]


def _tickets(call):
    values = (*call.args, *call.kwargs.values())
    return [ref for value in values for ref in _refs(value) if isinstance(ref.token, Ticket)]


def _settled(value):
    """An argument with what came of its calls in the place of their tickets."""
    if isinstance(value, Ref) and isinstance(value.token, Ticket):
        return Ref(value.port, value.token.done)
    if isinstance(value, Rows):
        return Rows(tuple(map(_settled, value.parts)), value.index, value.count)
    if isinstance(value, list):
        return [_settled(item) for item in value]
    return value
