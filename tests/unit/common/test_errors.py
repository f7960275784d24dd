# SPDX-License-Identifier: Apache-2.0
"""One tree of errors: picklable, each saying whether a retry may help and what must restart."""

import importlib
import pickle
import pkgutil
import re

import pytest

import dlrover.python.rl as package
from dlrover.python.rl.common import errors
from dlrover.python.rl.common.errors import (
    AccessDenied,
    CallError,
    CallSkipped,
    CheckpointCorrupt,
    CheckpointMissing,
    ClassNotFound,
    ClusterUnavailable,
    ConfigError,
    DataError,
    DLRoverRLError,
    EngineDied,
    EngineError,
    EnvironmentFailed,
    InvalidJob,
    InvocationError,
    InvocationTimeout,
    JobConflict,
    JobError,
    JobFailed,
    JournalCorrupt,
    MasterLost,
    MissingExtra,
    NonFiniteUpdate,
    OtherLayout,
    OutOfDeviceMemory,
    PlacementTimeout,
    ReplayDiverged,
    ResultLost,
    RowsDiffer,
    Scope,
    ScriptFailed,
    ServiceBusy,
    ServiceError,
    ServiceUnavailable,
    SessionError,
    ShardError,
    StaleCall,
    StaleEpoch,
    StepAbandoned,
    UnknownJob,
    UnknownMethod,
    VerifierCrashed,
    VerifierError,
    VerifierTimeout,
    WeightsLost,
    WeightSyncError,
    WorkloadDied,
    WorkloadStartError,
    user_traceback,
)
from dlrover.python.rl.common.extensions import load_object
from dlrover.python.rl.common.names import check_job_name

ERRORS = (ConfigError("trainer.class", "is required"), ConfigError("train.jsonl:7", "not JSON"))
CALL = {"role": "ACTOR", "rank": 3, "method": "update", "node": "host-1", "remote_traceback": "Traceback ..."}

EXAMPLES = {
    DLRoverRLError: DLRoverRLError("words"),
    InvalidJob: InvalidJob(ERRORS),
    ClassNotFound: ClassNotFound("words"),
    MissingExtra: MissingExtra("vllm", "vllm"),
    DataError: DataError(ERRORS),
    RowsDiffer: RowsDiffer("words"),
    EngineError: EngineError("words"),
    OtherLayout: OtherLayout("words"),
    EngineDied: EngineDied("words"),
    OutOfDeviceMemory: OutOfDeviceMemory("words"),
    WeightSyncError: WeightSyncError("words"),
    WeightsLost: WeightsLost("version 3 from ACTOR[0] cannot be fetched"),
    NonFiniteUpdate: NonFiniteUpdate("words"),
    SessionError: SessionError("words"),
    CallError: CallError("words"),
    UnknownMethod: UnknownMethod("words"),
    ShardError: ShardError("words"),
    InvocationError: InvocationError("words", **CALL),
    InvocationTimeout: InvocationTimeout(role="ACTOR", method="update", timeout_s=2.5, late=[1, 2], arrived={0: "r"}),
    ResultLost: ResultLost("words", **CALL),
    CallSkipped: CallSkipped("words", **CALL),
    ReplayDiverged: ReplayDiverged("words", **CALL),
    StaleCall: StaleCall("words", **CALL),
    WorkloadDied: WorkloadDied("words", **CALL),
    WorkloadStartError: WorkloadStartError("ACTOR[0]", "words", "Traceback ..."),
    ScriptFailed: ScriptFailed("words"),
    ClusterUnavailable: ClusterUnavailable("words"),
    VerifierError: VerifierError("words", "Traceback ..."),
    VerifierTimeout: VerifierTimeout("words"),
    VerifierCrashed: VerifierCrashed("words"),
    EnvironmentFailed: EnvironmentFailed("words", "Traceback ..."),
    PlacementTimeout: PlacementTimeout("words"),
    ServiceError: ServiceError("words"),
    UnknownJob: UnknownJob("words"),
    AccessDenied: AccessDenied("words"),
    ServiceBusy: ServiceBusy("words"),
    ServiceUnavailable: ServiceUnavailable("words"),
    JobError: JobError("words"),
    JobFailed: JobFailed("words"),
    JobConflict: JobConflict("words"),
    MasterLost: MasterLost("words"),
    JournalCorrupt: JournalCorrupt("words"),
    CheckpointCorrupt: CheckpointCorrupt("step-00000001.e1/ACTOR-0.1.state", "words"),
    CheckpointMissing: CheckpointMissing("words"),
    StaleEpoch: StaleEpoch("words"),
}


def tree_of_classes():
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DLRoverRLError)]


def test_every_class_has_an_example_here():
    assert set(EXAMPLES) == set(tree_of_classes())


@pytest.mark.parametrize("error", EXAMPLES.values(), ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_everything_it_says(error):
    error.note = {"step": 3}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(error, protocol))
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert back.args == error.args
        assert vars(back) == vars(error)
        assert (back.retryable, back.restarts) == (error.retryable, error.restarts)


def test_the_original_exception_travels_inside():
    error = InvocationError("words", **CALL)
    error.original = ValueError("the user's own words")
    back = pickle.loads(pickle.dumps(error))
    assert isinstance(back.original, ValueError)
    assert str(back.original) == "the user's own words"


def test_the_tree_in_the_docstring_is_the_tree_of_classes():
    tree, parents = {}, []
    for line in errors.__doc__.split("::\n")[1].splitlines():
        match = re.match(r"    (?P<indent>[│├└─ ]*)(?P<name>[A-Z]\w+)", line)
        if match is None:
            continue
        depth = len(match["indent"]) // 4
        parents[depth:] = [match["name"]]
        tree[match["name"]] = parents[depth - 1] if depth else "Exception"
    assert tree == {kind.__name__: kind.__bases__[0].__name__ for kind in tree_of_classes()}


def test_what_helps_after_an_error():
    retried = {kind for kind in tree_of_classes() if kind.retryable}
    lost = {WorkloadDied, ResultLost, CallSkipped, ReplayDiverged}
    of_engines = {EngineDied, NonFiniteUpdate, WeightSyncError, WeightsLost}
    later = {InvocationTimeout, PlacementTimeout, ClusterUnavailable, ServiceBusy, ServiceUnavailable}
    assert retried == {*lost, *of_engines, *later, RowsDiffer, ScriptFailed}
    assert {kind: kind.restarts for kind in tree_of_classes() if kind.restarts is not Scope.NOTHING} == {
        InvocationTimeout: Scope.MEMBER,
        EngineDied: Scope.MEMBER,
        ScriptFailed: Scope.MEMBER,
        WorkloadDied: Scope.MEMBER,
        ReplayDiverged: Scope.JOB,
        PlacementTimeout: Scope.JOB,
        NonFiniteUpdate: Scope.TRAINER,
        RowsDiffer: Scope.TRAINER,
        WeightSyncError: Scope.TRAINER,
        WeightsLost: Scope.TRAINER,
    }


def test_messages_name_the_place():
    assert str(InvocationError("ValueError: no", **{**CALL, "remote_traceback": ""})) == (
        "ACTOR[3].update on host-1: ValueError: no"
    )
    assert str(EXAMPLES[InvocationError]).endswith("\n\nTraceback ...")
    assert str(EXAMPLES[InvocationTimeout]) == "ACTOR[1].update: no answer within 2.5 s from ranks 1, 2 (1 arrived)"
    assert str(EXAMPLES[MissingExtra]) == "'vllm' is not installed: pip install 'dlrover-rl[vllm]'"
    assert str(EXAMPLES[WorkloadStartError]).startswith("ACTOR[0] could not start: words\n\nTraceback")


def test_an_invalid_job_lists_every_error():
    assert str(EXAMPLES[InvalidJob]) == (
        "2 errors in the job:\n  - trainer.class: is required\n  - train.jsonl:7: not JSON"
    )
    assert str(InvalidJob([ERRORS[0], ERRORS[0]])).startswith("1 error in the job:")


def test_leaving_a_step_passes_a_users_except():
    assert not issubclass(StepAbandoned, Exception)
    cause = ValueError("words")
    assert (StepAbandoned(3, cause).step, StepAbandoned(3, cause).cause) == (3, cause)


def test_a_misspelt_method_is_an_attribute_error_too():
    assert issubclass(UnknownMethod, AttributeError)


def test_an_error_of_the_package_has_a_traceback_of_the_users_frames_if_there_are_some():
    with pytest.raises(ClassNotFound) as caught:
        load_object("no_such_module:Name")
    error = caught.value
    trace = user_traceback(error)
    assert __file__ in trace and "common/extensions.py" not in trace
    assert user_traceback(error.with_traceback(error.__traceback__.tb_next)) == ""
    with pytest.raises(ValueError) as caught:
        check_job_name("A b")
    error = caught.value
    assert "common/names.py" in user_traceback(error.with_traceback(error.__traceback__.tb_next)), "an unexpected one"


# Raised and caught inside its room; nobody outside ever sees it.
CAUGHT_AT_HOME = {"DoesNotFit"}


def test_the_light_rooms_define_no_error_of_their_own():
    for room in ("common", "config", "control", "trainer", "master"):
        folder = importlib.import_module(f"{package.__name__}.{room}")
        for info in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            values = vars(importlib.import_module(info.name)).values()
            kinds = [kind for kind in values if isinstance(kind, type) and issubclass(kind, BaseException)]
            own = [kind for kind in kinds if kind.__module__ == info.name and kind.__name__ not in CAUGHT_AT_HOME]
            assert not own or info.name == errors.__name__, own
