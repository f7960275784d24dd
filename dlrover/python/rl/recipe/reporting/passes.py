# SPDX-License-Identifier: Apache-2.0
"""How many tokens the passes of a run's engines have, and whether activations are recomputed: chosen once in a run, by
its trainer, so that all ranks and those that replace them compute alike.

A trainer that replaces another one makes the same calls, as in all of ``init``. Members answer those from what they
keep, also the one with the choice: so the first choice stays, whatever the second one would be.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.base.engine_workload import DeviceShare
from dlrover.python.rl.recipe.base.memory_bytes import GB, ModelUse, has_auto_passes
from dlrover.python.rl.recipe.base.memory_plan import MemoryPlan
from dlrover.python.rl.trainer.port import gather

_LOG = get_logger(__name__)


def choose_passes(trainer: Any, cfg: Any) -> EngineConfig:
    """``cfg.engine`` without ``auto`` for passes."""
    engine: EngineConfig = cfg.engine
    if not has_auto_passes(engine):
        return engine
    uses = trainer.model_uses(cfg, {role: len(handles) for role, handles in trainer.actor_handles.items()})
    groups = {role: getattr(trainer, f"RG_{role}") for role in uses}
    asked = {role: group for role, group in groups.items() if hasattr(group.workload_class, "device_share")}
    shares = {role: _all_of(group.device_share, engine) for role, group in asked.items()}
    capacity = smallest_device(engine, uses, shares)
    chosen = MemoryPlan(uses, engine, cfg.model, cfg.model_config, capacity).size_passes().engine
    now = chosen.tokens_of_a_pass, chosen.recomputes
    kept = [answer for group in asked.values() for answer in _all_of(group.keep_passes, *now)]
    tokens, recompute = next((first for first in kept if first != now), now)
    _LOG.info("passes of %d tokens, activations %s", tokens, "recomputed" if recompute else "kept")
    return engine.with_passes(tokens, recompute)


def _all_of(method: Any, *arguments: Any) -> list[Any]:
    """The answers of all members, also of those that compute on the same rows."""
    return gather(method.options(blocking=False)(*arguments).refs, None)


def smallest_device(
    engine: EngineConfig,
    uses: Mapping[RLRoleType, ModelUse],
    shares: Mapping[RLRoleType, Sequence[DeviceShare | None]],
) -> float | None:
    """Bytes that each member which trains or evaluates has for itself: of a device that members have at the same time,
    its part. None where nothing is known."""
    if engine.device_memory_gb is not None:
        return engine.device_memory_gb * GB
    users = Counter(share.place for found in shares.values() for share in found if share is not None)
    own = [
        share.nbytes / (1 if share.in_turn else users[share.place])
        for role, found in shares.items()
        for share in found
        if share is not None and uses[role].kind != "rollout"
    ]
    return min(own, default=None)
