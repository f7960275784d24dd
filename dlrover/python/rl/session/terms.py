"""What the processes of engines are told. The classes in them are named, not imported: a script needs no model code."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrover.python.rl.engine.base import Rendezvous, RolloutSettings, TrainSettings

TRAIN_PROCESS = "dlrover.python.rl.session.train_process:TrainProcess"
INFERENCE_PROCESS = "dlrover.python.rl.session.inference_process:InferenceProcess"


@dataclass(frozen=True)
class TrainTerms:
    """What a process of a train engine is told.

    Attributes:
        name: of the engine.
        settings: of the engine.
        rendezvous: where its ranks meet.
    """

    name: str
    settings: TrainSettings
    rendezvous: Rendezvous


@dataclass(frozen=True)
class InferenceTerms:
    """What a process of an inference engine is told.

    Attributes:
        who: what messages call it.
        engine: the rollout engine's class, or where it is: ``package.module:Class``.
        model: folder or hub name.
        settings: of the engine.
    """

    who: str
    engine: Any
    model: str | Path
    settings: RolloutSettings
