# SPDX-License-Identifier: Apache-2.0
"""The causes that made steps slow, each with its process and its cost."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, mode
from typing import Literal, NamedTuple

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.page.curves import Row, parts_of
from dlrover.python.rl.page.spans import TRAINER, CallSpan, Loss, StepLanes, last_step, read_steps

_SLOW_RATIO, _SLOW_SHARE = 2.0, 0.2  # to the peers' median, and of the step: less is noise
_SLOW_STEPS, _SLOW_S = 3, 0.4  # as many slow steps, or as long a delay in one: another program may cause less
_UNEQUAL_RATIO, _UNEQUAL_SHARE, _UNEQUAL_STEPS = 1.5, 0.1, 3
_WHOLE_SHARE = 0.05  # of all steps together
_TRAINER_SHARE, _TRAINER_S = 0.3, 0.1
_LAST_STEPS = 20
_HUNG_RATIO, _HUNG_S = 5.0, 10.0
_PART_SHARE, _PART_S, _FEWEST_STEPS = 0.5, 1.0, 3


@dataclass(frozen=True)
class Finding:
    """A cause of lost time. ``cost_s`` is its sum over the steps; ``method`` is empty for the trainer's own code, and
    the part, without a ``process``, of a slow part."""

    kind: Literal["slow_rank", "hung_call", "lost_member", "imbalance", "trainer", "slow_part"]
    process: str
    method: str
    cost_s: float
    sentence: str
    remedy: str


def findings(steps: Sequence[StepLanes]) -> list[Finding]:
    """Return what cost most time in these attempts of steps, the most first; nothing for steps without a cause that
    stands out."""
    causes = [*_losses(steps), *_hanging(steps), *_slow_ranks(steps), *_trainer(steps)]
    return sorted(causes, key=lambda finding: -finding.cost_s)


def last_findings(folder: Path) -> list[Finding]:
    last = last_step(folder)
    return findings(read_steps(folder, max(last - _LAST_STEPS + 1, 1), last))


def slow_parts(rows: Sequence[Row]) -> list[Finding]:
    """Return the part that made the last step of these metrics slow: it took half of the step longer than its median in
    the steps before. A part that most of those do not have, such as an evaluation, is not compared."""
    *before, parts = ({part["name"]: part["seconds"] for part in parts_of(row)[1]} for row in rows[-_LAST_STEPS - 1 :])
    usual_s = {name: median(each.get(name, 0.0) for each in before) for name in parts if len(before) >= _FEWEST_STEPS}
    costs_s = {name: parts[name] - seconds for name, seconds in usual_s.items() if seconds}
    name = max(costs_s, key=costs_s.__getitem__, default="")
    if costs_s.get(name, 0.0) < max(_PART_SHARE * sum(parts.values()), _PART_S):
        return []
    times = f"took {parts[name]:.3g} s here, and {usual_s[name]:.3g} s in the {len(before)} steps before"
    remedy = "Compare the step's samples and logs with earlier ones."
    return [Finding("slow_part", "", name, costs_s[name], f"{name.capitalize()} {times}.", remedy)]


def time_lines(folder: Path) -> list[str]:
    """Return what made the last steps of a run slow, as text; nothing if no cause stands out."""
    causes = [f"  {finding.sentence} {finding.remedy}" for finding in last_findings(folder)]
    return ["What made the last steps slow:", *causes] if causes else []


def _losses(steps: Iterable[StepLanes]) -> Iterator[Finding]:
    """Yield one finding for each loss with the losses that it caused, such as other ranks' restarts."""
    for step in steps:
        end_s, together = 0.0, list[list[Loss]]()
        for loss in sorted(step.losses, key=lambda each: each.begin_s):
            if loss.begin_s > end_s:
                together.append([])
            together[-1].append(loss)
            end_s = max(end_s, loss.end_s)
        for losses in together:
            first = min(losses, key=lambda each: (not each.is_reported, each.gone_s))
            cost_s = max(each.end_s for each in losses) - min(each.begin_s for each in losses)
            yield _loss(step.step, first, len(losses) - 1, cost_s)


def _loss(step: int, loss: Loss, more: int, cost_s: float) -> Finding:
    name, method = str(loss.process), loss.method.lstrip("!")
    where = f"{name}.{method}" if method else name
    peers = f", and {more} more workers restarted" if more else ""
    if loss.is_hung:
        sentence = f"{where} hung in step {step}: {cost_s:.3g} s until the call began again{peers}."
        remedy = f"See its stack in 'explain'; a lower hang_after_s of {loss.process.role.lower()} ends it sooner."
        return Finding("hung_call", name, method, cost_s, sentence, remedy)
    sentence = f"{name} was lost in step {step}: {cost_s:.3g} s until its call began again{peers}."
    remedy = f"See the log of {loss.process.log_name}; a standby of {loss.process.role.lower()} replaces it sooner."
    return Finding("lost_member", name, method, cost_s, sentence, remedy)


def _hanging(steps: Sequence[StepLanes]) -> Iterator[Finding]:
    """Yield the calls that still run in an unfinished step, and take much longer than others."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for process, call in (each for step in steps for each in step.calls):
        times[process.role, call.method].append(call.end_s - call.begin_s)
    for lane in (lane for step in steps if step.is_open for lane in step.lanes):
        last = lane.spans[-1] if lane.spans else None
        usual = times.get((lane.process.partition("[")[0], last.label)) if last is not None else None
        if last is None or last.cause != "has not ended" or not usual:
            continue
        seconds = last.end_s - last.begin_s
        if seconds > max(_HUNG_S, _HUNG_RATIO * median(usual)):
            sentence = (
                f"{lane.process}.{last.label} has run for {seconds:.3g} s; it usually takes {median(usual):.3g} s."
            )
            remedy = "See its stack: dlrover-rl stacks. A call without progress is ended after the role's hang_after_s."
            yield Finding("hung_call", lane.process, last.label, seconds, sentence, remedy)


class _Delay(NamedTuple):
    """The slowest of the ranks that ran a method in a step, and the median of the others."""

    process: str
    slowest_s: float
    usual_s: float
    mean_s: float
    step_s: float

    def is_beyond(self, ratio: float, share: float, base_s: float) -> bool:
        return self.slowest_s >= ratio * self.usual_s and self.slowest_s - base_s >= share * self.step_s


def _slow_ranks(steps: Sequence[StepLanes]) -> Iterator[Finding]:
    """Yield methods in which one rank is slow, or the ranks take unequal times."""
    whole_s = sum(step.end_s - step.begin_s for step in steps)
    delays_of: dict[tuple[str, str], list[_Delay]] = defaultdict(list)
    for step in steps:
        for of_role, seconds in _seconds_by_rank(step).items():
            *peers_s, slowest_s = sorted(seconds.values())
            process, step_s = max(seconds, key=seconds.__getitem__), step.end_s - step.begin_s
            delays_of[of_role].append(_Delay(process, slowest_s, median(peers_s), fmean(seconds.values()), step_s))
    for (role, method), delays in delays_of.items():
        slow = [each for each in delays if each.is_beyond(_SLOW_RATIO, _SLOW_SHARE, each.usual_s)]
        process = mode(each.process for each in slow) if slow else ""
        own = [each for each in slow if each.process == process]
        delays_s = [each.slowest_s - each.usual_s for each in own]
        cost_s, is_noise = sum(delays_s), len(own) < _SLOW_STEPS and max(delays_s, default=0.0) < _SLOW_S
        unequal = [each for each in delays if each.is_beyond(_UNEQUAL_RATIO, _UNEQUAL_SHARE, each.mean_s)]
        if 2 * len(own) > len(slow) and cost_s >= _WHOLE_SHARE * whole_s and not is_noise:
            times_s = fmean(each.slowest_s for each in own), fmean(each.usual_s for each in own)
            where = f"in {len(own)} of {len(steps)} steps" if len(steps) > 1 else f"in step {steps[0].step}"
            sentence = f"{process}.{method} took {times_s[0]:.3g} s, its peers {times_s[1]:.3g} s, {where}"
            remedy = "Compare its node and device with its peers'; liveness.replace_slow replaces such workers."
            yield Finding("slow_rank", process, method, cost_s, f"{sentence}{_cost(cost_s, whole_s)}", remedy)
        elif len(unequal) >= max(_UNEQUAL_STEPS, len(steps) / 2):
            cost_s = sum(each.slowest_s - each.mean_s for each in unequal)
            sentence = f"The ranks of {role}.{method} take unequal times{_cost(cost_s, whole_s)}"
            remedy = "Divide the work more evenly, such as by length, or let the trainer overlap it with other calls."
            yield Finding("imbalance", role, method, cost_s, sentence, remedy)


def _cost(cost_s: float, whole_s: float) -> str:
    return f": {cost_s:.3g} s, {cost_s / whole_s:.0%} of the time."


def _seconds_by_rank(step: StepLanes) -> dict[tuple[str, str], dict[str, float]]:
    """Return role and method to the seconds of each rank in the calls that several ranks ran, without failed ones and
    those during a loss."""
    groups: dict[tuple[str, int], list[tuple[ProcessId, CallSpan]]] = defaultdict(list)
    for process, call in step.calls:
        is_whole = all(call.end_s <= loss.begin_s or call.begin_s >= loss.end_s for loss in step.losses)
        if call.step == step.step and not call.error and is_whole:
            groups[process.role, call.n].append((process, call))
    seconds: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for process, call in (each for calls in groups.values() if len(dict(calls)) > 1 for each in calls):
        seconds[process.role, call.method][str(process)] += call.end_s - call.begin_s
    return seconds


def _trainer(steps: Sequence[StepLanes]) -> Iterator[Finding]:
    """Yield the trainer's own code, if it often runs while no worker does."""
    whole_s = sum(step.end_s - step.begin_s for step in steps)
    cost_s = sum(map(_own_seconds, steps))
    if steps and cost_s >= max(_TRAINER_SHARE * whole_s, _TRAINER_S * len(steps)):
        sentence = f"All workers wait for the trainer's own code{_cost(cost_s, whole_s)}"
        remedy = "Move work from the trainer to its workers, or overlap it with calls: options(blocking=False)."
        yield Finding("trainer", TRAINER, "", cost_s, sentence, remedy)


def _own_seconds(step: StepLanes) -> float:
    """Return the time in which the trainer's code runs and no worker's call does."""
    busy = sorted((span.begin_s, span.end_s) for lane in step.lanes[1:] for span in lane.spans if span.kind != "wait")
    seconds = 0.0
    for own in (span for lane in step.lanes[:1] for span in lane.spans if span.kind == "call"):
        at_s = own.begin_s
        for begin_s, end_s in busy:
            if end_s > at_s and begin_s < own.end_s:
                seconds += max(begin_s - at_s, 0.0)
                at_s = max(at_s, min(end_s, own.end_s))
        seconds += own.end_s - at_s
    return seconds
