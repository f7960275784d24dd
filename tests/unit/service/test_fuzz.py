# SPDX-License-Identifier: Apache-2.0
"""Random job files and messages: each is taken, or refused as what it is, within a second."""

import random
import string
import time

import grpc
import pytest
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import DLRoverRLError, InvalidJob
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.service.jobs.records import SubmitJob
from dlrover.python.rl.service.jobs.submissions import check_submission
from dlrover.python.rl.service.proto import rl_jobs_pb2 as wire
from dlrover.python.rl.service.server import MAX_MESSAGE, SERVICE
from tests.support.served import JOB, serving

EACH_S = 1.0
LENGTHS = [pytest.param(1.2, id="short"), pytest.param(20.0, marks=pytest.mark.slow, id="long")]
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}

words = st.sampled_from(
    [
        "name",
        "trainer",
        "workload",
        "actor",
        "num",
        "config",
        "env",
        "class",
        "module",
        "${a}",
        "${oc.env:HOME}",
        "../x",
    ]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | words
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


def fuzz(strategy, check, for_s):
    """Try examples of ``strategy`` for some seconds; the seeds are told when one fails."""
    until_s = time.monotonic() + for_s
    number = 0
    while time.monotonic() < until_s:
        number += 1

        @seed(number)
        @settings(max_examples=100, database=None, suppress_health_check=list(HealthCheck))
        @given(strategy)
        def once(value):
            began_s = time.monotonic()
            check(value)
            assert time.monotonic() - began_s < EACH_S

        once()


def loads(text):
    try:
        assert isinstance(load_job_text(text, "fuzzed"), JobSpec)
    except InvalidJob as error:
        assert error.errors and str(error)


@st.composite
def spoilt(draw, text):
    """The text with pieces taken out, doubled, or replaced."""
    generator = random.Random(draw(st.integers(0, 2**32)))
    letters = list(text)
    for _ in range(generator.randint(1, 6)):
        at = generator.randrange(len(letters))
        match generator.randrange(4):
            case 0:
                del letters[at : at + generator.randint(1, 20)]
            case 1:
                letters[at:at] = letters[at : at + generator.randint(1, 40)]
            case 2:
                letters[at] = generator.choice(string.printable + "\0\x7f\u2028\ud800&*!|>%@`")
            case 3:
                letters[at:at] = generator.choice(
                    ["!!python/object:os.system ", "&a ", "*a", "<<: ", "{", "[", "${", "? "]
                )
        letters = letters or ["x"]
    return "".join(letters)


@pytest.mark.parametrize("for_s", LENGTHS)
@pytest.mark.parametrize("kind", ["text", "spoilt", "trees"])
def test_the_loader_takes_or_refuses_any_text(kind, for_s):
    strategy = {"text": st.text(max_size=200), "spoilt": spoilt(JOB), "trees": trees.map(dump)}[kind]
    fuzz(strategy, loads, for_s)


def dump(tree):
    return yaml.safe_dump(tree)


requests = st.builds(
    dict,
    client_token=st.text(max_size=10) | st.just("token"),
    name=st.text(max_size=10) | words | st.just("job"),
    job_file=spoilt(JOB) | st.text(max_size=50).filter(lambda text: text.isprintable()),
    overrides=st.lists(words | st.text(max_size=20), max_size=3),
    folder=st.text(max_size=20) | words,
    priority=st.integers(-(2**31), 2**31 - 1),
)


@pytest.mark.parametrize("for_s", LENGTHS)
def test_a_submission_is_taken_or_refused(tmp_path, for_s):
    def check(fields):
        try:
            request = wire.SubmitRequest(**fields)
        except (ValueError, UnicodeEncodeError):
            return  # not UTF-8: no client can send it
        try:
            assert isinstance(check_submission(request, "ann", tmp_path), SubmitJob)
        except DLRoverRLError as error:
            assert isinstance(error, InvalidJob)

    fuzz(requests, check, for_s)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def service(tmp_path):
    with serving(tmp_path, steps=2) as running:
        yield running


@pytest.fixture
def ask(service):
    """Ask a method with any bytes: the code of the refusal and its details."""
    metadata = (("authorization", f"Bearer {service.token}"),)
    with grpc.insecure_channel(service.address, options=[("grpc.max_send_message_length", -1)]) as channel:

        def ask(method, body):
            call = channel.unary_stream if method.server_streaming else channel.unary_unary
            try:
                answer = call(f"/{SERVICE.full_name}/{method.name}")(body, metadata=metadata, timeout=30)
                if method.server_streaming:
                    next(answer, None)
                    answer.cancel()
            except grpc.RpcError as error:
                return error.code(), error.details()
            return None, ""

        yield ask


@pytest.mark.slow
@pytest.mark.parametrize("for_s", LENGTHS)
def test_random_bytes_are_no_internal_error_of_any_method(service, ask, for_s):
    def check(example):
        code, details = ask(*example)
        assert code is None or code in REFUSALS, details

    methods = st.sampled_from([each for each in SERVICE.methods if each.name not in ("Wait", "Watch")])
    fuzz(st.tuples(methods, st.binary(max_size=60)), check, for_s)
    with service.client() as client:
        assert client.submit(JOB, name="after").name == "after"


@pytest.mark.slow
def test_huge_messages_are_refused_and_the_service_goes_on(service, ask):
    for size in (MAX_MESSAGE + 1, 100_000_000):
        code, details = ask(SERVICE.methods_by_name["Submit"], bytes(size))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and len(details.splitlines()) == 1
    with service.client() as client:
        assert client.list_jobs() == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("config: {" + ", ".join(f"k{n}: 1" for n in range(1_000_000)) + "}", "bytes"),
        ("config: !!python/object/apply:os.system [id]", "tag"),
        ("config: {a: '${oc.env:HOME}'}", "oc.env"),
        ("x: " + "[" * 20_000 + "]" * 20_000, "deep"),
        ("a: &a [1,1]\n" + "\n".join(f"b{n}: [*a, *a]" for n in range(200)), "alias"),
    ],
    ids=["keys", "tag", "resolver", "deep", "aliases"],
)
def test_hostile_job_files_are_refused_in_one_line_within_a_second(text, words):
    base = "trainer: {module: m, class: T}\nworkload: {actor: {module: m, class: A}}\n"
    began_s = time.monotonic()
    with pytest.raises(InvalidJob) as caught:
        load_job_text(base + text, "job")
    assert time.monotonic() - began_s < EACH_S
    (error,) = caught.value.errors
    assert words in str(error) and len(str(error).splitlines()) == 1
