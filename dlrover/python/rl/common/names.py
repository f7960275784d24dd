"""Names of jobs and of the actors that belong to them."""

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


def trainer_name(job: str, incarnation: int) -> str:
    """The actor name of a job's trainer in one incarnation of the job."""
    return f"{job}/{incarnation}/trainer"


def member_name(job: str, incarnation: int, role: str, rank: int) -> str:
    """The actor name of one member of a role group in one incarnation of the job."""
    return f"{job}/{incarnation}/{role}-{rank}"
