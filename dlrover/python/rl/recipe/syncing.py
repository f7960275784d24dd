"""The actor's weights on their way to the rollouts, as a trainer has it done."""

from typing import Any

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.weights import WeightStamp
from dlrover.python.rl.trainer.shard import Replicate


def give_weights(trainer: Any) -> WeightStamp:
    """Give the actor's weights to every rollout member; returns once all of them serve just these.

    Args:
        trainer: has the role groups.

    Raises:
        WeightSyncError: a rollout holds others.
    """
    ticket, *_ = trainer.RG_ACTOR.publish_weights()
    received = trainer.RG_ROLLOUT.receive_weights(Replicate(ticket))
    given: WeightStamp
    (given,) = trainer.RG_ACTOR.published()
    for rank, stamp in enumerate(received):
        if stamp != given:
            raise WeightSyncError(f"ROLLOUT[{rank}] received weights of {stamp}, not of {given}")
    return given
