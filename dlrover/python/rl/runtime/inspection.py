"""Looking at a job's classes before it starts: do they import, are they what they should be, what do they object to.

The classes are the user's code, so the master and the command line never import them: :func:`inspect_in_child` does it
in a process of its own, with a deadline.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import ClassNotFound, InvalidJob, Problem
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import RecoveryScope
from dlrover.python.rl.runtime.durability import resumed_layout
from dlrover.python.rl.runtime.loading import load_class
from dlrover.python.rl.trainer.role_group import public_methods
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload, is_stateful

DEADLINE_S = 180.0
"""How long importing and asking all classes may take."""


@dataclass(frozen=True)
class Inspection:
    """What looking at the classes found.

    Attributes:
        problems: everything that speaks against starting.
        methods: role to the public methods of its workload.
        single_process_refusals: problems that only arise when all members share one process.
        collectives: the roles whose ranks meet in collectives: they recover together.
    """

    problems: tuple[Problem, ...] = ()
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    single_process_refusals: tuple[Problem, ...] = ()
    collectives: tuple[str, ...] = ()

    def scope_of(self, role: str) -> RecoveryScope:
        """What restarts when a member of ``role`` is lost."""
        return RecoveryScope.GROUP if role in self.collectives else RecoveryScope.MEMBER


def inspect_job(job: JobSpec) -> Inspection:
    """Import the job's classes here and ask them."""
    problems: list[Problem] = []
    refusals: list[Problem] = []
    methods: dict[str, tuple[str, ...]] = {}
    collectives: list[str] = []
    stateful: dict[str, int] = {}
    roles = {role: spec.num for role, spec in job.workloads.items()}
    trainer = _load(problems, "trainer", job.trainer.module, job.trainer.class_, BaseTrainer, job)
    if trainer is not None:
        missing = sorted(trainer.__abstractmethods__)
        if missing:
            problems.append(Problem("trainer.class", f"{job.trainer.class_} does not define {', '.join(missing)}"))
        problems += _ask("trainer", lambda: trainer.check_config(job.config, roles))
    for role, spec in job.workloads.items():
        where = f"workload.{role.lower()}"
        workload = _load(problems, where, spec.module, spec.class_, BaseWorkload, job)
        if workload is None:
            continue
        methods[role] = tuple(public_methods(workload))
        stateful |= {str(role): spec.num} if is_stateful(workload) else {}
        problems += [item for item in _ask(where, _question(workload, job)) if item not in problems]
        if not workload.needs_own_process:
            continue
        collectives.append(str(role))
        if spec.num > 1:
            what = f"{spec.num} members of {spec.class_} meet in collectives, which one process cannot hold; use num=1"
            refusals.append(Problem(f"{where}.num", what))
    problems += _resume_problems(job, stateful) if len(methods) == len(roles) else []
    return Inspection(tuple(problems), methods, tuple(refusals), tuple(collectives))


def _resume_problems(job: JobSpec, stateful: Mapping[str, int]) -> list[Problem]:
    """A copy of other members cannot be gone on from, and is left as it is."""
    resumed = resumed_layout(job)
    if resumed is None or resumed[1] == stateful:
        return []
    folder, saved = resumed
    what = f"{folder} holds the state of {_counted(saved)}, and this job's members with state are {_counted(stateful)}"
    return [Problem("checkpoint.resume", f"{what}: make them the same, or choose another job_dir or 'never'")]


def _counted(members: Mapping[str, int]) -> str:
    return ", ".join(f"{role} x{number}" for role, number in sorted(members.items())) or "none"


def _question(workload: Any, job: JobSpec) -> Callable[[], Iterable[Problem]]:
    return lambda: workload.check_config(job.config)


def _load(problems: list[Problem], where: str, module: str, name: str, base: type, job: JobSpec) -> Any:
    if not module or not name:
        return None  # said already: such a job comes from salvage
    try:
        found = load_class(module, name, job.search_path)
    except ClassNotFound as error:
        problems.append(Problem(f"{where}.class", str(error)))
        return None
    if not issubclass(found, base):
        problems.append(Problem(f"{where}.class", f"{name} does not extend {base.__name__}"))
        return None
    return found


def _ask(where: str, question: Callable[[], Iterable[Problem]]) -> list[Problem]:
    """What a class's own check says; a check that fails is a problem itself."""
    try:
        return list(question())
    except InvalidJob as error:
        return list(error.problems)
    except Exception as error:  # noqa: BLE001 -- the user's code: whatever it raises is reported as a problem
        return [Problem(where, f"check_config raised {type(error).__name__}: {error}")]


def inspect_in_child(job: JobSpec, deadline_s: float = DEADLINE_S) -> Inspection:
    """Like :func:`inspect_job`, in a child process that is ended at the deadline."""
    with tempfile.TemporaryDirectory(prefix="dlrover-rl-") as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        request.write_text(json.dumps({"job": job_to_yaml(job), "name": job.name, "search_path": job.search_path}))
        command = [sys.executable, "-m", "dlrover.python.rl.runtime.inspection", str(request), str(answer)]
        try:
            child = subprocess.run(
                command,
                timeout=deadline_s,
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, **{"OMP_NUM_THREADS": "1"}, **job.env},
            )
        except subprocess.TimeoutExpired:
            return Inspection((Problem("job", f"importing its classes took longer than {deadline_s:g} s"),))
        if child.returncode or not answer.exists():
            last = (child.stderr.strip().splitlines() or ["no output"])[-1]
            return Inspection((Problem("job", f"importing its classes ended with code {child.returncode}: {last}"),))
        return _from_json(json.loads(answer.read_text()))


def _from_json(data: Mapping[str, Any]) -> Inspection:
    return Inspection(
        tuple(Problem(*item) for item in data["problems"]),
        {RLRoleType(role): tuple(names) for role, names in data["methods"].items()},
        tuple(Problem(*item) for item in data["single_process_refusals"]),
        tuple(data["collectives"]),
    )


def _serve(request: Path, answer: Path) -> None:
    asked = json.loads(request.read_text())
    job = load_job_text(asked["job"], asked["name"], search_path=tuple(asked["search_path"]))
    found = inspect_job(job)
    answer.write_text(
        json.dumps(
            {
                "problems": [(item.where, item.what) for item in found.problems],
                "methods": found.methods,
                "single_process_refusals": [(item.where, item.what) for item in found.single_process_refusals],
                "collectives": found.collectives,
            }
        )
    )


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
