"""What the ready workloads have in common: how an engine is asked for, and where it runs."""

import hashlib
import importlib
import json
from typing import Any

import torch

from dlrover.python.rl.engine.base import TrainSettings
from dlrover.python.rl.engine.layout import ParallelSizes
from dlrover.python.rl.engine.sync.base import SyncSettings
from dlrover.python.rl.engine.sync.pull import PullTransport
from dlrover.python.rl.recipe.config import EngineConfig
from dlrover.python.rl.trainer.workload import BaseWorkload

TRAINED = ("tokens", "action_mask")

_PATIENCE_S = 5.0
"""How long a receiver of weights stands by a sender that is silent; it asks the role again then."""


def device_of(workload: BaseWorkload, engine: EngineConfig) -> str:
    """The torch device of a member: where the job says ``cuda``, the first one reserved for this member, or that of its
    place on the node."""
    if engine.device != "cuda":
        return engine.device
    return f"cuda:{workload.devices[0] if workload.devices else workload.local_rank}"


def weight_transport(member: BaseWorkload, device: str, leads: bool = False) -> PullTransport:
    """How weights get from the actor to the rollouts: each fetches them, from its own node's memory or through TCP."""
    settings = SyncSettings(f"{member.role}[{member.rank}]", leads=leads, patience_s=_PATIENCE_S, device=device)
    return PullTransport(settings, member.torch_master_addr or "127.0.0.1")


def train_settings(engine: EngineConfig, device: str, parallel: ParallelSizes) -> TrainSettings:
    """How a train engine runs by a job's ``engine``."""
    return TrainSettings(
        device,
        engine.precision,
        max_tokens_per_microbatch=engine.max_tokens_per_microbatch,
        gradient_checkpointing=engine.gradient_checkpointing,
        parallel=parallel,
        backend=engine.train_options,
    )


def parallel_sizes(engine: EngineConfig, members: int) -> ParallelSizes:
    """Copies of the whole model by default, where they can be had: none needs another one to come back."""
    return engine.parallel or ParallelSizes(ddp_size=members if engine.train == "fsdp2" else 1)


def vocabulary_mark(tokenizer: Any) -> str:
    """The same for tokenizers that give every token the same id."""
    told = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def use_threads(count: int | None) -> None:
    """Compute with so many CPU threads; None changes nothing."""
    if count is not None:
        torch.set_num_threads(count)


def warming() -> Any:
    """Not imported above: who does not wait for a death needs none of the classes it loads."""
    return importlib.import_module("dlrover.python.rl.recipe.warming")
