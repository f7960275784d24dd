"""How much of the devices each member takes.

A role that says how much it takes gets that. One that does not takes a whole device, or, in a group, an equal share of
what the others of the group leave of theirs. All members of a role take the same.
"""

from collections.abc import Mapping

from dlrover.python.rl.common.errors import Problem
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.spec import JobSpec

UNITS = 10_000
"""Devices are counted in ten-thousandths, Ray's own resolution: sums stay exact."""


def member_resources(job: JobSpec) -> tuple[dict[RLRoleType, dict[str, float]], list[Problem]]:
    """What one member of each role takes of which resource (``memory`` in MB), and what cannot be."""
    device = job.trainer.device_type.lower()
    asked = {
        role: {name.lower(): float(amount) for name, amount in spec.resource.items()}
        for role, spec in job.workloads.items()
    }
    problems = []
    for role, amounts in asked.items():
        if job.trainer.device_type == "GPU" and amounts.get(device, 0.0) > 1 and amounts[device] % 1:
            what = f"a member would take {amounts[device]:g} GPU; more than one must be a whole number"
            problems.append(Problem(f"workload.{role.lower()}.resource.gpu", what))
    for group in job.groups:
        problems += _share(job, {role: asked[role] for role in group}, device)
    for amounts in asked.values():
        amounts.setdefault(device, 1.0)
    return asked, problems


def _share(job: JobSpec, asked: Mapping[RLRoleType, dict[str, float]], device: str) -> list[Problem]:
    """Give every role of a group that names no amount its share; what cannot be."""
    kind = job.trainer.device_type
    named = {role: round(amounts[device] * UNITS) for role, amounts in asked.items() if device in amounts}
    unnamed = [role for role in asked if role not in named]
    text = " + ".join(f"{role} {units / UNITS:g}" for role, units in named.items())
    parts = sum(units for units in named.values() if units < UNITS)
    if kind == "GPU" and parts > UNITS and len(asked) > 1:
        where = f"workload.{min(named, key=list(asked).index).lower()}.resource.{device}"
        return [Problem(where, f"the parts of one GPU that its group shares are too many: {text}")]
    if not unnamed:
        return []
    taken = sum(named.values())
    share = (max(UNITS, -(-taken // UNITS) * UNITS) - taken) // len(unnamed)
    if not share:
        what = f"say how much it takes: the others of its group leave nothing of what they share ({text})"
        return [Problem(f"workload.{role.lower()}.resource.{device}", what) for role in unnamed]
    for role in unnamed:
        asked[role][device] = share / UNITS
    return []
