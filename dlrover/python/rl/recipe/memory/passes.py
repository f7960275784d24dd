# SPDX-License-Identifier: Apache-2.0
"""What depends on the memory of a run's devices: how many tokens the passes of engines have, whether activations are
recomputed, and whether roles that share a device leave it for each other. Passes are chosen once in a run, by its
trainer, so that all ranks and those that replace them compute alike.

A trainer that replaces another one makes the same calls, as in all of ``init``. Members answer those from what they
keep, also the one with the choice: so the first choice stays, whatever the second one would be.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.recipe.base.config import AUTO, EngineConfig
from dlrover.python.rl.recipe.base.engine_workload import DeviceShare
from dlrover.python.rl.recipe.base.model_files import GB
from dlrover.python.rl.recipe.memory.arithmetic import (
    ModelUse,
    PlannedBytes,
    bytes_of,
    fit_together,
    has_auto_passes,
)
from dlrover.python.rl.recipe.memory.plan import MemoryPlan
from dlrover.python.rl.trainer.port import gather

_LOG = get_logger(__name__)


def choose_passes(trainer: Any, cfg: Any, uses: Mapping[RLRoleType, ModelUse]) -> EngineConfig:
    """Return ``cfg.engine`` without ``auto`` for passes and offload, and for weight sync where it is not ``pull``."""
    engine: EngineConfig = cfg.engine
    may_stay = engine.offload == AUTO or (engine.offload is False and engine.weight_sync == AUTO)
    asks = may_stay and engine.device.startswith("cuda")
    if not has_auto_passes(engine) and not asks:
        return engine
    groups = {role: getattr(trainer, f"RG_{role}") for role in uses}
    sharing = {role: group for role, group in groups.items() if hasattr(group.workload_class, "device_share")}
    shares = {role: _all_of(group.device_share, engine) for role, group in sharing.items()}
    capacity = smallest_device(engine, uses, shares)
    plan = MemoryPlan(uses, engine, cfg.model, cfg.model_config, capacity).size_passes()
    if has_auto_passes(engine):
        now = plan.engine.tokens_of_a_pass, plan.engine.recomputes
        choices = [answer for group in sharing.values() for answer in _all_of(group.keep_passes, *now)]
        tokens, recompute = next((first for first in choices if first != now), now)
        _LOG.info("passes of %d tokens, activations %s", tokens, "recomputed" if recompute else "kept")
        plan = replace(plan, engine=engine.with_passes(tokens, recompute))
    if not asks:
        return plan.engine
    unplanned = {role for role in trainer.actor_handles if role not in sharing and _uses_device(trainer, role)}
    engine = plan.engine
    if engine.offload == AUTO:
        stay = all_stay(plan, shares, unplanned, plan.kept_bytes if engine.weight_sync == "cuda_ipc" else 0.0)
        if any(share.in_turn for members in shares.values() for share in members if share is not None):
            _LOG.info("engines %s the devices that they share", "stay on" if stay else "leave")
        engine = replace(engine, offload=not stay)
    if not engine.offload and engine.weight_sync == AUTO and weights_stay(plan, shares, unplanned):
        _LOG.info("new weights for the rollout stay on the device")
        return replace(engine, weight_sync="cuda_ipc")
    return engine


def weights_stay(
    plan: MemoryPlan, shares: Mapping[RLRoleType, Sequence[DeviceShare | None]], unplanned: Collection[RLRoleType] = ()
) -> bool:
    """Whether the weights between an actor and a rollout can be kept on their device: they have one, whose memory one
    opens to the other, and it has room for them where all engines stay."""
    sides = [shares.get(role, ()) for role in (RLRoleType.ACTOR, RLRoleType.ROLLOUT)]
    members = [share for side in sides for share in side if share is not None and share.opens]
    if [len(side) for side in sides] != [1, 1] or len(members) != 2 or len({share.place for share in members}) != 1:
        return False
    return all_stay(plan, shares, unplanned, plan.kept_bytes)


def _uses_device(trainer: Any, role: RLRoleType) -> bool:
    return bool(getattr(getattr(trainer, f"RG_{role}").workload_class, "uses_device", True))


def all_stay(
    plan: MemoryPlan,
    shares: Mapping[RLRoleType, Sequence[DeviceShare | None]],
    unplanned: Collection[RLRoleType] = (),
    more: float = 0.0,
) -> bool:
    """Whether members that have devices in turn can keep what they have there: all of it fits, with ``more`` bytes.
    False where the needs of one are not known, as of ``unplanned`` roles, which the plan lacks, or where rows may be
    longer than planned."""
    planned = {role: bytes_of(shape, use, plan.engine) for role, use, shape in plan.known() if use.bounded}
    places: dict[str, list[tuple[RLRoleType, DeviceShare]]] = {}
    for role, share in ((role, share) for role, members in shares.items() for share in members if share is not None):
        places.setdefault(share.place, []).append((role, share))
    shared = [place for place in places.values() if any(share.in_turn for _, share in place)]
    members = [member for place in shared for member in place]
    if not members or plan.engine.rollout != "torch" or not all(share.in_turn for _, share in members):
        return False
    if any(role not in planned or any(str(other) in share.roles for other in unplanned) for role, share in members):
        return False
    return all(_fit(planned, place, more) for place in shared)


def _fit(
    planned: Mapping[RLRoleType, PlannedBytes], place: Sequence[tuple[RLRoleType, DeviceShare]], more: float
) -> bool:
    capacity, free = (min(each) for each in zip(*((share.nbytes, share.free) for _, share in place), strict=True))
    return fit_together([planned[role] for role, _ in place], capacity, free, more)


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
    users = Counter(share.place for members in shares.values() for share in members if share is not None)
    own = [
        share.nbytes / (1 if share.in_turn else users[share.place])
        for role, members in shares.items()
        for share in members
        if share is not None and uses[role].kind != "rollout"
    ]
    return min(own, default=None)
