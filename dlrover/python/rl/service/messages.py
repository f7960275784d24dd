# SPDX-License-Identifier: Apache-2.0
"""Records as messages of the protocol, and errors as status codes."""

import grpc

from dlrover.python.rl.common import errors
from dlrover.python.rl.common.errors import DLRoverRLError, InvalidJob, ServiceUnavailable
from dlrover.python.rl.common.log import valid_text
from dlrover.python.rl.master.process.status import devices_of
from dlrover.python.rl.service.jobs.records import JobEvent, JobPhase, JobRecord
from dlrover.python.rl.service.proto import rl_jobs_pb2 as wire

RESIZE_S = 150.0  # limit of a resize, which checks the job's classes and reserves resources
QUOTA = "quota"  # metadata key of the end of a call that a quota refused: to repeat it at once is of no use
UPLOAD_S = 150.0  # limit of the last part of an upload, after which the folder is unpacked
STREAM_OPEN = "stream-open"  # metadata key, sent at the start of a stream: its first message may come much later
_SHARED_FIELDS = (
    "name", "run", "owner", "priority", "revision", "cause", "submitted_s", "started_s", "ended_s", "step",
    "total_steps", "reward", "restarts", "step_s", "last_step_s", "work_dir",
)  # fmt: skip
_MAX_DETAIL, _MAX_DETAILS = 16_000, 3_000
_PHASES = {phase: wire.Phase.Value(f"PHASE_{phase.name}") for phase in JobPhase}
_CODES: tuple[tuple[type[DLRoverRLError], grpc.StatusCode], ...] = (
    (InvalidJob, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.UnknownJob, grpc.StatusCode.NOT_FOUND),
    (errors.JobConflict, grpc.StatusCode.ALREADY_EXISTS),
    (errors.CallError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.AccessDenied, grpc.StatusCode.PERMISSION_DENIED),
    (errors.ServiceBusy, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ServiceUnavailable, grpc.StatusCode.UNAVAILABLE),
)


def job_message(record: JobRecord) -> wire.Job:
    return wire.Job(
        **{name: getattr(record, name) for name in _SHARED_FIELDS},
        phase=_PHASES[record.phase],
        folder=record.results,
        reason=valid_text(record.reason),
        detail=valid_text(record.detail[-_MAX_DETAIL:]),
        activity=valid_text(record.activity),
        roles=dict(record.roles),
        recoveries=dict(record.recoveries),
        devices=devices_of(record.members),
        members=[wire.Member(**member._asdict()) for member in record.members],
    )


def event_message(event: JobEvent) -> wire.Event:
    return wire.Event(
        **{name: getattr(event, name) for name in ("number", "at_s", "name", "run", "kind", "step")},
        message=valid_text(event.message),
        phase=_PHASES[event.phase],
        metrics={valid_text(name): value for name, value in event.metrics.items()},
    )


def phase_of(message: wire.Job | wire.Event) -> JobPhase:
    return JobPhase(wire.Phase.Name(message.phase).removeprefix("PHASE_").lower())


def code_of(error: DLRoverRLError) -> grpc.StatusCode:
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def details_of(error: DLRoverRLError) -> str:
    """Return the text of an error: one line, for an invalid job one for each of its errors."""
    text = valid_text("\n".join(map(str, error.errors)) if isinstance(error, InvalidJob) else str(error))
    return text if len(text) <= _MAX_DETAILS else f"{text[:_MAX_DETAILS]}..."


def error_of(failure: grpc.RpcError) -> DLRoverRLError:
    """Return the error that the service answered with."""
    code, details = failure.code(), failure.details() or ""
    if QUOTA in dict(failure.trailing_metadata() or ()):
        return errors.QuotaReached(details)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return errors.AccessDenied(details)
    if code is grpc.StatusCode.UNIMPLEMENTED:  # Upload is the only method that a service may lack
        return errors.CallError("this service is older and has no --working-dir")
    if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return ServiceUnavailable(details or "the service did not answer in time")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        faults = [line.partition(": ") for line in details.splitlines()]
        return InvalidJob([errors.ConfigError(where, fault) for where, _, fault in faults])
    return {code: kind for kind, code in _CODES}.get(code, errors.ServiceError)(details)
