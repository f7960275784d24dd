# SPDX-License-Identifier: Apache-2.0
"""Names of jobs, roles, processes and their Ray actors; nearest-name hints for error messages.

Every actor name has the job and the run in it, so two jobs, or two runs of one job, never share one."""

import difflib
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import ClassVar

NAMESPACE = "dlrover-rl"  # the Ray namespace of all actors of all jobs
_JOB = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PROCESS = re.compile(r"(?P<role>[^\[\]]+?)(?P<standby>-standby)?\[(?P<rank>-?\d+)\]")


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    versions = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def package_version() -> str:
    """Return the installed version; ``"0+unknown"`` for a source tree that is not installed."""
    return next(iter(installed_versions(["dlrover-rl", "dlrover-rl-core"]).values()), "0+unknown")


def nearest(name: str, candidates: Iterable[str], similarity: float = 0.6) -> str | None:
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=similarity)
    return by_lower[matches[0]] if matches else None


def nearest_path(path: str, candidates: Iterable[str]) -> str | None:
    """Return the nearest dotted key whose parts are all near: equal parts do not make a different part near."""
    parts = path.split(".")
    split = [(key, key.split(".")) for key in candidates if key.count(".") + 1 == len(parts)]
    near = [key for key, own in split if all(nearest(part, [other]) for part, other in zip(parts, own, strict=True))]
    return nearest(path, near)


def is_url(place: object) -> bool:
    return "://" in str(place)


def hint(name: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"``, or the list of candidates if none is close."""
    names = sorted(candidates)
    close = nearest(name, names)
    if close is not None:
        return f"; did you mean '{close}'?"
    return f"; known: {', '.join(names)}" if names else ""


def variable_hint(text: str) -> str:
    """Return the spelling in a job file for an environment variable that ``text`` has as in a shell, ``$HOME/data``."""
    variable = re.search(r"\$(\w+)", text)
    return f"; an environment variable is written ${{oc.env:{variable[1]}}}" if variable else ""


class ProcessKind(StrEnum):
    MEMBER = "member"
    STANDBY = "standby"
    TRAINER = "trainer"


@dataclass(frozen=True, order=True)
class ProcessId:
    """One process of a job, printed as ``ROLLOUT[1]``, ``ROLLOUT-standby[2]`` or ``trainer``."""

    role: str
    rank: int = 0  # a standby's number, 0 for the trainer
    kind: ProcessKind = ProcessKind.MEMBER

    @classmethod
    def standby(cls, role: str, number: int) -> "ProcessId":
        return cls(role, number, ProcessKind.STANDBY)

    @classmethod
    def parse(cls, text: str) -> "ProcessId":
        """Read the text of ``str()``; raises ValueError for any other."""
        if text == TRAINER_ID.role:
            return TRAINER_ID
        match = _PROCESS.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a process such as ROLLOUT[1], ROLLOUT-standby[2] or trainer")
        kind = ProcessKind.STANDBY if match["standby"] else ProcessKind.MEMBER
        return cls(match["role"], int(match["rank"]), kind)

    @property
    def pool(self) -> str:
        """The name that it shares with its peers: ``ROLLOUT``, ``ROLLOUT-standby`` or ``trainer``."""
        return f"{self.role}-standby" if self.kind is ProcessKind.STANDBY else f"{self.role}"

    @property
    def file_name(self) -> str:
        """The spelling in names of files: ``ROLLOUT-1``."""
        return f"{self.role}-{self.rank}"

    @property
    def log_name(self) -> str:
        """The spelling in names of logs: ``rollout-1``, ``trainer``."""
        return self.role if self.kind is ProcessKind.TRAINER else self.file_name.lower()

    def __str__(self) -> str:
        return self.pool if self.kind is ProcessKind.TRAINER else f"{self.pool}[{self.rank}]"


TRAINER_ID = ProcessId("trainer", 0, ProcessKind.TRAINER)


def log_name(process: str) -> str:
    """Return the name of a process's log: ``rollout-1`` for ``ROLLOUT[1]``, and for ``rollout-1`` itself."""
    return process.lower().replace("[", "-").rstrip("]")


def is_job_name(name: str) -> bool:
    return _JOB.fullmatch(name) is not None


def name_of_file(file: Path) -> str:
    """Return the name of a job whose file has none."""
    name = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in file.stem.lower())
    return name.strip("-")[:63].strip("-") or "job"


def check_job_name(name: str) -> str:
    """Return ``name`` if it is a DNS label (it becomes part of actor names and paths), else raise ValueError."""
    if not is_job_name(name):
        close = re.sub("[^a-z0-9]+", "-", name.lower())[:63].strip("-")
        raise ValueError(
            f"'{name}' is not a job name: use 1 to 63 of a-z, 0-9 and '-', beginning and ending with a letter or digit"
            f"{f', such as {close!r}' if close else ''}"
        )
    return name


def master_name(job: str) -> str:
    return f"{job}/master"


def trainer_name(job: str, run: str, epoch: int) -> str:
    return f"{job}/{run}/trainer/{epoch}"


def member_name(job: str, run: str, role: str, rank: int, incarnation: int) -> str:
    return f"{job}/{run}/{ProcessId(role, rank).file_name}/{incarnation}"


def standby_name(job: str, run: str, role: str, number: int) -> str:
    """Return the actor name of a standby, which it keeps when it becomes a worker."""
    return f"{job}/{run}/{ProcessId.standby(role, number).pool}/{number}"


def run_of(member: str) -> tuple[str, str]:
    """Return the job and the run in a worker's actor name."""
    job, run, *_ = member.split("/")
    return job, run


_ROLE = re.compile(r"[A-Z][A-Z0-9_]*")


def is_role_name(name: str) -> bool:
    return _ROLE.fullmatch(str(name).upper()) is not None


class RLRoleType(str):
    """The name of a role, always upper case: ``RLRoleType("actor") == "ACTOR"``.

    The five roles of the integration guide are constants; any other valid name is also a role. It is a ``str``, so both
    are keys of a mapping by roles. ``name`` and ``value`` are as in an enum."""

    __slots__ = ()

    ACTOR: ClassVar["RLRoleType"]
    ROLLOUT: ClassVar["RLRoleType"]
    REWARD: ClassVar["RLRoleType"]
    REFERENCE: ClassVar["RLRoleType"]
    CRITIC: ClassVar["RLRoleType"]

    def __new__(cls, name: str) -> "RLRoleType":
        upper = str(name).upper()
        if not is_role_name(upper):
            raise ValueError(f"'{name}' is not a role name: use letters, digits and '_', starting with a letter")
        return super().__new__(cls, upper)

    @property
    def name(self) -> str:
        return str(self)

    @property
    def value(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"RLRoleType.{self}"


WELL_KNOWN_ROLES = tuple(map(RLRoleType, ("ACTOR", "ROLLOUT", "REWARD", "REFERENCE", "CRITIC")))

RLRoleType.ACTOR, RLRoleType.ROLLOUT, RLRoleType.REWARD, RLRoleType.REFERENCE, RLRoleType.CRITIC = WELL_KNOWN_ROLES


def resume_command(folder: Path | str) -> str:
    """Return the command that continues the run in ``folder``."""
    return f"dlrover-rl resume {shlex.quote(str(folder))}"
