# SPDX-License-Identifier: Apache-2.0
"""One tree of errors: picklable, each saying whether a retry may help and what must restart."""

import importlib
import pickle
import pkgutil
import re

import pytest

import dlrover.python.rl as package
from dlrover.python.rl.common import errors
from dlrover.python.rl.common.errors import ConfigError, InvalidJob, InvocationError, InvocationTimeout, Scope
from dlrover.python.rl.common.extensions import load_object
from dlrover.python.rl.common.names import check_job_name


def tree_of_classes():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, errors.DLRoverRLError)]


ERRORS = (ConfigError("trainer.class", "is required"), ConfigError("train.jsonl:7", "not JSON"))
CALL = {"role": "ACTOR", "rank": 3, "method": "update", "node": "host-1", "remote_traceback": "Traceback ..."}
EXAMPLES = {
    InvalidJob: InvalidJob(ERRORS),
    errors.MissingExtra: errors.MissingExtra("vllm", "vllm"),
    errors.DataError: errors.DataError(ERRORS),
    InvocationTimeout: InvocationTimeout(role="ACTOR", method="update", timeout_s=2.5, late=[1, 2], arrived={0: "r"}),
    errors.WorkloadStartError: errors.WorkloadStartError("ACTOR[0]", "words", "Traceback ..."),
    errors.VerifierError: errors.VerifierError("words", "Traceback ..."),
    errors.EnvironmentFailed: errors.EnvironmentFailed("words", "Traceback ..."),
    errors.CheckpointCorrupt: errors.CheckpointCorrupt("step-00000001.e1/ACTOR-0.1.state", "words"),
}
for kind in tree_of_classes():
    if kind not in EXAMPLES:
        EXAMPLES[kind] = kind("words", **CALL if issubclass(kind, InvocationError) else {})


@pytest.mark.parametrize("error", EXAMPLES.values(), ids=lambda error: type(error).__name__)
def test_error_survives_pickling_with_its_values(error):
    error.note = {"step": 3}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(error, protocol))
        assert (type(back), str(back), back.args, vars(back)) == (type(error), str(error), error.args, vars(error))


def test_error_keeps_the_original_exception():
    error = InvocationError("words", **CALL)
    error.original = ValueError("the user's own words")
    assert repr(pickle.loads(pickle.dumps(error)).original) == repr(error.original)


def test_error_tree_of_the_docstring_matches_the_classes():
    tree, parents = {}, []
    for line in errors.__doc__.split("::\n")[1].splitlines():
        match = re.match(r"    (?P<indent>[│├└─ ]*)(?P<name>[A-Z]\w+)", line)
        if match is None:
            continue
        depth = len(match["indent"]) // 4
        parents[depth:] = [match["name"]]
        tree[match["name"]] = parents[depth - 1] if depth else "Exception"
    assert tree == {kind.__name__: kind.__bases__[0].__name__ for kind in tree_of_classes()}


def test_error_says_whether_to_retry_and_restart():
    retried = {kind for kind in tree_of_classes() if kind.retryable}
    lost = {errors.WorkloadDied, errors.ResultLost, errors.CallSkipped, errors.ReplayDiverged}
    of_engines = {errors.EngineDied, errors.NonFiniteUpdate, errors.WeightSyncError, errors.WeightsLost}
    later = {InvocationTimeout, errors.PlacementTimeout, errors.ClusterUnavailable}
    busy = {errors.ServiceBusy, errors.QuotaReached, errors.ServiceUnavailable}
    assert retried == {*lost, *of_engines, *later, *busy, errors.RowsDiffer, errors.ScriptFailed}
    members = {InvocationTimeout, errors.EngineDied, errors.ScriptFailed, errors.WorkloadDied}
    of_trainers = {errors.NonFiniteUpdate, errors.RowsDiffer, errors.WeightSyncError, errors.WeightsLost}
    assert {kind: kind.restarts for kind in tree_of_classes() if kind.restarts is not Scope.NOTHING} == {
        **dict.fromkeys(members, Scope.MEMBER), **dict.fromkeys(of_trainers, Scope.TRAINER),
        errors.ReplayDiverged: Scope.JOB, errors.PlacementTimeout: Scope.JOB,
    }  # fmt: skip


def test_error_messages_name_the_place():
    untraced = InvocationError("ValueError: no", **{**CALL, "remote_traceback": ""})
    assert str(untraced) == "ACTOR[3].update on host-1: ValueError: no"
    assert str(EXAMPLES[InvocationError]).endswith("\n\nTraceback ...")
    late = "ACTOR[1].update: no answer within 2.5 s from ranks 1, 2 (1 arrived)"
    assert str(EXAMPLES[InvocationTimeout]) == late
    assert str(EXAMPLES[errors.MissingExtra]) == "'vllm' is not installed: pip install 'dlrover-rl[vllm]'"
    assert str(EXAMPLES[errors.WorkloadStartError]).startswith("ACTOR[0] could not start: words\n\nTraceback")


def test_invalid_job_lists_every_error():
    assert str(InvalidJob(ERRORS)) == f"2 errors in the job:\n  - {ERRORS[0]}\n  - train.jsonl:7: not JSON"
    assert str(InvalidJob([ERRORS[0], ERRORS[0]])).startswith("1 error in the job:")


def test_step_abandoned_passes_a_users_except():
    assert issubclass(errors.UnknownMethod, AttributeError)
    assert not issubclass(errors.StepAbandoned, Exception)
    cause = ValueError("words")
    assert (errors.StepAbandoned(3, cause).step, errors.StepAbandoned(3, cause).cause) == (3, cause)


def test_user_traceback_has_the_users_frames():
    with pytest.raises(errors.ClassNotFound) as caught:
        load_object("no_such_module:Name")
    trace = errors.user_traceback(caught.value)
    assert __file__ in trace and "common/extensions.py" not in trace
    assert errors.user_traceback(caught.value.with_traceback(caught.tb.tb_next)) == ""
    with pytest.raises(ValueError) as unexpected:
        check_job_name("A b")
    assert "common/names.py" in errors.user_traceback(unexpected.value.with_traceback(unexpected.tb.tb_next))


def test_light_packages_define_no_errors():
    for package_name in ("common", "config", "control", "trainer", "master"):
        folder = importlib.import_module(f"{package.__name__}.{package_name}")
        for info in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            values = vars(importlib.import_module(info.name)).values()
            kinds = [kind for kind in values if isinstance(kind, type) and issubclass(kind, BaseException)]
            own = [kind.__name__ for kind in kinds if kind.__module__ == info.name]
            assert own in ([], ["DoesNotFit"]) or info.name == errors.__name__, own  # caught where it is raised
