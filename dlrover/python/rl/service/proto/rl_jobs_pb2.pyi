from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_QUEUED: _ClassVar[Phase]
    PHASE_STARTING: _ClassVar[Phase]
    PHASE_RUNNING: _ClassVar[Phase]
    PHASE_STOPPING: _ClassVar[Phase]
    PHASE_FINISHED: _ClassVar[Phase]
    PHASE_FAILED: _ClassVar[Phase]
    PHASE_STOPPED: _ClassVar[Phase]
PHASE_UNSPECIFIED: Phase
PHASE_QUEUED: Phase
PHASE_STARTING: Phase
PHASE_RUNNING: Phase
PHASE_STOPPING: Phase
PHASE_FINISHED: Phase
PHASE_FAILED: Phase
PHASE_STOPPED: Phase

class Job(_message.Message):
    __slots__ = ("name", "run", "owner", "phase", "priority", "revision", "reason", "cause", "detail", "submitted_s", "started_s", "ended_s", "step", "total_steps", "reward", "restarts", "folder", "activity", "roles", "members", "step_s", "recoveries", "last_step_s", "devices", "work_dir")
    class RolesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RecoveriesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_S_FIELD_NUMBER: _ClassVar[int]
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    WORK_DIR_FIELD_NUMBER: _ClassVar[int]
    name: str
    run: str
    owner: str
    phase: Phase
    priority: int
    revision: int
    reason: str
    cause: str
    detail: str
    submitted_s: float
    started_s: float
    ended_s: float
    step: int
    total_steps: int
    reward: float
    restarts: int
    folder: str
    activity: str
    roles: _containers.ScalarMap[str, int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    step_s: float
    recoveries: _containers.ScalarMap[str, int]
    last_step_s: float
    devices: int
    work_dir: str
    def __init__(self, name: _Optional[str] = ..., run: _Optional[str] = ..., owner: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., priority: _Optional[int] = ..., revision: _Optional[int] = ..., reason: _Optional[str] = ..., cause: _Optional[str] = ..., detail: _Optional[str] = ..., submitted_s: _Optional[float] = ..., started_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., step: _Optional[int] = ..., total_steps: _Optional[int] = ..., reward: _Optional[float] = ..., restarts: _Optional[int] = ..., folder: _Optional[str] = ..., activity: _Optional[str] = ..., roles: _Optional[_Mapping[str, int]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., step_s: _Optional[float] = ..., recoveries: _Optional[_Mapping[str, int]] = ..., last_step_s: _Optional[float] = ..., devices: _Optional[int] = ..., work_dir: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("process", "node", "pid", "devices")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    process: str
    node: str
    pid: int
    devices: str
    def __init__(self, process: _Optional[str] = ..., node: _Optional[str] = ..., pid: _Optional[int] = ..., devices: _Optional[str] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("client_token", "job_file", "name", "overrides", "priority", "folder", "working_dir")
    CLIENT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    JOB_FILE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    WORKING_DIR_FIELD_NUMBER: _ClassVar[int]
    client_token: str
    job_file: str
    name: str
    overrides: _containers.RepeatedScalarFieldContainer[str]
    priority: int
    folder: str
    working_dir: str
    def __init__(self, client_token: _Optional[str] = ..., job_file: _Optional[str] = ..., name: _Optional[str] = ..., overrides: _Optional[_Iterable[str]] = ..., priority: _Optional[int] = ..., folder: _Optional[str] = ..., working_dir: _Optional[str] = ...) -> None: ...

class UploadRequest(_message.Message):
    __slots__ = ("digest", "size", "offset", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: str
    size: int
    offset: int
    data: bytes
    def __init__(self, digest: _Optional[str] = ..., size: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadResponse(_message.Message):
    __slots__ = ("received",)
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    received: int
    def __init__(self, received: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("all", "limit")
    ALL_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    all: bool
    limit: int
    def __init__(self, all: bool = ..., limit: _Optional[int] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("jobs", "left_out")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    left_out: int
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...

class WaitRequest(_message.Message):
    __slots__ = ("name", "timeout_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    timeout_s: float
    def __init__(self, name: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("name", "after", "follow", "without_steps")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_STEPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    after: int
    follow: bool
    without_steps: bool
    def __init__(self, name: _Optional[str] = ..., after: _Optional[int] = ..., follow: bool = ..., without_steps: bool = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("number", "at_s", "name", "run", "kind", "message", "phase", "step", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    number: int
    at_s: float
    name: str
    run: str
    kind: str
    message: str
    phase: Phase
    step: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, number: _Optional[int] = ..., at_s: _Optional[float] = ..., name: _Optional[str] = ..., run: _Optional[str] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., step: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("name", "hard", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HARD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    hard: bool
    reason: str
    def __init__(self, name: _Optional[str] = ..., hard: bool = ..., reason: _Optional[str] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("name", "process", "follow", "tail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    process: str
    follow: bool
    tail: int
    def __init__(self, name: _Optional[str] = ..., process: _Optional[str] = ..., follow: bool = ..., tail: _Optional[int] = ...) -> None: ...

class LogChunk(_message.Message):
    __slots__ = ("process", "text")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    process: str
    text: str
    def __init__(self, process: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ArtifactsRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ArtifactsResponse(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[Artifact]
    def __init__(self, files: _Optional[_Iterable[_Union[Artifact, _Mapping]]] = ...) -> None: ...

class Artifact(_message.Message):
    __slots__ = ("path", "bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    bytes: int
    def __init__(self, path: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("name", "path", "offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    offset: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ResizeRequest(_message.Message):
    __slots__ = ("name", "role", "num")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    num: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., num: _Optional[int] = ...) -> None: ...
