"""Names of jobs and of the actors that belong to them.

Every name carries the job and its run: two jobs, and two runs of one job, never meet.
"""

import re

_JOB = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

NAMESPACE = "dlrover-rl"
"""The Ray namespace that every job's actors live in; names inside it carry the job."""


def check_job_name(name: str) -> str:
    """Return ``name`` when it is a DNS label (it becomes part of actor names and paths), else raise ValueError."""
    if not _JOB.fullmatch(name):
        raise ValueError(
            f"'{name}' is not a job name: use 1 to 63 of a-z, 0-9 and '-', beginning and ending with a letter or digit"
        )
    return name


def master_name(job: str) -> str:
    """The actor name of a job's master."""
    return f"{job}/master"


def trainer_name(job: str, run: str, epoch: int) -> str:
    """The actor name of a job's trainer in one epoch."""
    return f"{job}/{run}/trainer/{epoch}"


def member_name(job: str, run: str, role: str, rank: int, incarnation: int) -> str:
    """The actor name of one incarnation of a member."""
    return f"{job}/{run}/{role}-{rank}/{incarnation}"


def standby_name(job: str, run: str, role: str, number: int) -> str:
    """The actor name of a standby; it keeps the name when it has taken a member's place."""
    return f"{job}/{run}/{role}-standby/{number}"


def run_of(member: str) -> tuple[str, str]:
    """The job and the run that a member's name carries."""
    job, run, *_ = member.split("/")
    return job, run
