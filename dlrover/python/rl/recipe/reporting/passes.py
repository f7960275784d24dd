# SPDX-License-Identifier: Apache-2.0
"""How many tokens the passes of a run's engines have, and whether activations are recomputed: chosen once in a run, by
its trainer, so that all ranks and those that replace them compute alike."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dlrover.python.rl.common.disk_space import DEFAULT_DISK_WAIT, replace
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.base.engine_workload import DeviceShare
from dlrover.python.rl.recipe.base.memory_bytes import GB, has_auto_passes
from dlrover.python.rl.recipe.base.memory_plan import MemoryPlan
from dlrover.python.rl.trainer.port import gather

_LOG = get_logger(__name__)

_FILE = "passes.json"


def choose_passes(trainer: Any, cfg: Any) -> EngineConfig:
    """``cfg.engine`` without ``auto`` for passes. A trainer that replaces another one takes over its choice, which it
    finds in the job's directory."""
    engine: EngineConfig = cfg.engine
    if not has_auto_passes(engine):
        return engine
    file = trainer.job_dir / _FILE
    if trainer.restart_info.count and file.is_file():
        chosen = json.loads(file.read_text())
        return engine.with_passes(chosen["tokens"], chosen["recompute"])
    uses = trainer.model_uses(cfg, {role: len(handles) for role, handles in trainer.actor_handles.items()})
    groups = [getattr(trainer, f"RG_{role}") for role in uses]
    capacity = smallest_device(engine, [share for group in groups for share in _ask(group, engine)])
    plan = MemoryPlan(uses, engine, cfg.model, cfg.model_config, capacity).size_passes()
    _LOG.info("%s", plan.chosen.strip().partition(";")[0])
    chosen = {"tokens": plan.engine.tokens_of_a_pass, "recompute": plan.engine.recomputes}
    replace(file, json.dumps(chosen).encode(), DEFAULT_DISK_WAIT)
    return plan.engine


def _ask(group: Any, engine: EngineConfig) -> list[DeviceShare | None]:
    """Every member, also those that compute on the same rows."""
    if not hasattr(group.workload_class, "device_share"):
        return []
    found: list[DeviceShare | None] = gather(group.device_share.options(blocking=False)(engine).refs, None)
    return found


def smallest_device(engine: EngineConfig, shares: Sequence[DeviceShare | None]) -> float | None:
    """Bytes that each role has for itself; None where that is not known, as for roles that are on a device together."""
    if engine.device_memory_gb is not None:
        return engine.device_memory_gb * GB
    known = [share for share in shares if share is not None]
    users = Counter(share.place for share in known)
    if any(users[share.place] > 1 and not share.in_turn for share in known):
        return None
    return min((share.nbytes for share in known), default=None)
