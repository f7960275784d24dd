# SPDX-License-Identifier: Apache-2.0
"""Job files that are too large, too deep, entangled, or construct objects are refused in one line, and quickly."""

import time

import pytest

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.config.load import load_job, load_job_text
from dlrover.python.rl.config.plain import MAX_DEPTH, MAX_NODES, check_text, validate_resolvers

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
REFUSED = {
    "large": ("x: " + "y" * 1_000_001, "has 1000004 bytes, a job file has at most 1000000"),
    "many keys": ("config:\n" + "".join(f"  k{n}: 1\n" for n in range(MAX_NODES)), "more than 50000 keys and values"),
    "deep list": ("x: " + "[" * 20_000, "is nested more than 50 levels deep"),
    "deep mapping": ("x: " + "{a: " * 60 + "1" + "}" * 60, "is nested more than 50 levels deep"),
    "alias bomb": (BOMB, "has more than 100 aliases"),
    "python tag": (
        "x: !!python/object/apply:os.system ['true']",
        "the tag python/object/apply:os.system is not allowed",
    ),
    "own tag": ("x: !mine 3", "the tag !mine is not allowed"),
}


@pytest.mark.parametrize("text, why", REFUSED.values(), ids=REFUSED)
def test_what_no_job_file_has_is_refused_in_one_line(text, why):
    began_s = time.monotonic()
    with pytest.raises(InvalidJob) as refused:
        load_job_text(text, "job")
    assert time.monotonic() - began_s < 2.0
    (error,) = refused.value.errors
    assert why in str(error) and "\n" not in str(error)


def test_a_million_keys_are_refused_before_they_are_loaded(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("config:\n" + "".join(f"  k{n}: 1\n" for n in range(1_000_000)))
    began_s = time.monotonic()
    with pytest.raises(InvalidJob, match="has 12888898 bytes, a job file has at most 1000000"):
        load_job(file)
    assert time.monotonic() - began_s < 1.0


def test_what_a_job_file_has_passes():
    check_text("x: &a {k: 1}\ny: *a\nz: !!str 3\n" + "deep: " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1), "job")
    check_text("x: [unclosed", "job")  # the loader says what is wrong with it


def test_a_key_that_is_there_twice_is_refused():
    with pytest.raises(InvalidJob, match="found duplicate key"):
        load_job_text("config: {a: 1, a: 2}", "job")


@pytest.mark.parametrize(
    "text, name",
    [
        ("x: ${oc.env:HOME}", "oc.env"),
        ("x: ${ oc.decode : '1' }", "oc.decode"),
        ("x: a${mine:1}b", "mine"),
        ("x: ${${which}:1}", ""),
        ("x: ${a.${b}}", "a."),
        ("x: ${config.model}", None),
        ("x: ${..lr}", None),
        (r"x: \${oc.env:HOME}", None),
        (r"x: \\${oc.env:HOME}", "oc.env"),
    ],
)
def test_resolvers_are_told_from_references(text, name):
    calls = [error.what.partition(",")[0] for error in validate_resolvers({"x": text})]
    named = f"the resolver {name!r}" if name else "a resolver"
    assert calls == ([] if name is None else [f"calls {named}"])


def test_a_resolver_below_an_empty_key_is_refused_too():
    with pytest.raises(InvalidJob, match="calls a resolver"):
        load_job_text('"": ${:0}', "job")


def test_a_resolver_is_refused_unless_it_is_allowed(monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "s3cret")
    text = "config: {key: '${oc.env:SECRET_OF_MINE}'}"
    with pytest.raises(InvalidJob, match="config.key: calls the resolver 'oc.env', which may read the environment"):
        load_job_text(text, "job")
    with pytest.raises(InvalidJob, match="config.key: calls the resolver 'oc.env'"):
        load_job_text("config: {key: 1}", "job", ["key=${oc.env:SECRET_OF_MINE}"])
    with pytest.raises(InvalidJob, match="config.key.1.deep: calls the resolver 'oc.env'"):
        load_job_text("config: {key: 1}", "job", [r'key=[1, {deep: "\x24{oc.env:SECRET_OF_MINE}"}]'])
    monkeypatch.setenv("DLROVER_RL_ALLOW_RESOLVERS", "1")
    with pytest.raises(InvalidJob) as refused:  # only because it lacks the rest of a job
        load_job_text(text, "job")
    assert "resolver" not in str(refused.value)
