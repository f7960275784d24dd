# SPDX-License-Identifier: Apache-2.0
"""Job files and overrides: what is read, every way to be wrong, and limits of size, depth and tags."""

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.config.load import load_job, load_job_text
from dlrover.python.rl.config.plain import MAX_DEPTH, MAX_NODES, check_text, validate_resolvers
from tests.support.manual_clock import within

JOB = """
trainer: {module: m, class: T, device_type: CPU, device_per_node: 4}
workload:
  actor: {module: m, class: A, num: 2}
  rollout: {module: m, class: R}
config:
  lr: 1e-3
  data: {train: train.jsonl}
  sizes: [1, 2]
"""


NO_CONFIG = JOB.partition("config:")[0]
MALFORMED = "has a malformed reference: write ${key}, or \\${ for the text itself"


def problems_of(read, *args):
    """Place and fault of everything that ``read`` refuses."""
    with pytest.raises(InvalidJob) as caught:
        read(*args)
    return [(problem.where, problem.what) for problem in caught.value.errors]


@pytest.fixture
def job_file(tmp_path):
    def write(text=JOB, name="job.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


# -- files ------------------------------------------------------------------------------------------------------------


def test_load_job_searches_its_folder_for_classes(job_file, monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONPATH", raising=False)  # whose folders come last
    monkeypatch.chdir(tmp_path)
    path = job_file(name="My Job_1.yaml")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    job = load_job(path)
    assert job.name == "my-job-1"
    assert job.search_path == (str(tmp_path / "elsewhere"), str(tmp_path))
    assert job.run_folders == tmp_path / "elsewhere" / "runs" / "my-job-1"
    assert (job.workloads["ACTOR"].num, job.workloads["ROLLOUT"].num) == (2, 1)


@pytest.mark.parametrize(("name", "expected"), [("___.yaml", "job"), ("a" * 80 + ".yaml", "a" * 63), ("ü.yml", "job")])
def test_load_job_gives_a_name_from_any_file_name(job_file, name, expected):
    assert load_job(job_file(name=name)).name == expected


@pytest.mark.parametrize(
    ("content", "place", "fault"),
    [
        (b"\xff\xfe\x00", "", "cannot be read: 'utf-8' codec"),
        (b"a: 1\nb: [1, 2\nc: 3\n", ":3", "expected ',' or ']'"),
        (b"a: 1\n\tb: 2\n", ":2", "the line is indented with a tab; indent it with spaces"),
        (b"a: 1\na: 2\n", ":2", "found duplicate key a"),
    ],
)
def test_malformed_file_is_reported_with_its_line(tmp_path, content, place, fault):
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    ((where, problem),) = problems_of(load_job, path)
    assert where == f"{path}{place}"
    assert fault in problem


def test_missing_file_is_answered_with_the_nearest(job_file):
    path = job_file().with_name("jop.yaml")
    assert problems_of(load_job, path) == [(str(path), "no such job file; did you mean 'job.yaml'?")]
    assert problems_of(load_job, "no/such/job.yaml") == [("no/such/job.yaml", "no such job file")]


@pytest.mark.parametrize(
    ("text", "overrides", "problem"),
    [
        ("[1, 2]", [], ("rl_config", "a job file is a mapping at its top level")),
        (NO_CONFIG + "config: hello", ["lr=1"], ("config", "must be a mapping of your settings, not a single value")),
        (NO_CONFIG + "config: [a]", ["lr=1"], ("config", "must be a mapping of your settings, not a list")),
        (NO_CONFIG + "config: {lr: '${no}'}", ["lr.x=1"], ("lr.x", "Interpolation key 'no' not found")),
    ],
)
def test_text_of_another_kind_is_refused(text, overrides, problem):
    assert problems_of(load_job_text, text, "x", overrides) == [problem]


# -- overrides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("config.lr=0.5", lambda job: job.config.lr, 0.5),
        ("data.train=a=b", lambda job: job.config.data.train, "a=b"),
        ("lr=null", lambda job: job.config.lr, None),
        ("lr=[1, 2]", lambda job: job.config.lr, [1, 2]),
        ("data={train: x}", lambda job: job.config.data, {"train": "x"}),
        ("sizes.1=7", lambda job: job.config.sizes, [1, 7]),
        ("+a.b.c=1", lambda job: job.config.a.b.c, 1),
        ("workload.rollout.num=3", lambda job: job.workloads["ROLLOUT"].num, 3),
        ("workload.rollout.resource.cpu=0.5", lambda job: job.workloads["ROLLOUT"].resource, {"cpu": 0.5}),
        ("env.KEY=text", lambda job: job.env, {"KEY": "text"}),
        ("placement_timeout_s=3", lambda job: job.placement_timeout_s, 3.0),
        ("+config.trainer=1", lambda job: job.config.trainer, 1),
        ("data.train=${.dir}/x", lambda job: job.config._get_node("data")._get_node("train")._value(), "${.dir}/x"),
    ],
)
def test_override_changes_one_value(override, read, value):
    assert read(load_job_text(JOB, "x", [override])) == value


def test_overrides_are_applied_in_order(job_file):
    job = load_job_text(JOB, "x", ["+dir=/data", "lr=1", "data.train=${config.dir}/x.jsonl", "lr=1e-6"])
    assert (job.config.data.train, job.config.lr) == ("/data/x.jsonl", 1e-6)
    job = load_job(job_file(), ["+env.API_KEY = a:b=c", "+judge.api_key=d e"])
    assert job.env["API_KEY"].strip() == "a:b=c" and job.config.judge.api_key == "d e"


def test_config_is_not_resolved_and_may_be_empty():
    assert load_job_text(f"{NO_CONFIG}config:\n", "x").config == {}
    assert "lr" in load_job_text(JOB.replace("1e-3", "${nothing.here}"), "x").config


def faults_of(override):
    """The errors of an override, or of its unlisted keys."""
    try:
        faults = load_job_text(JOB, "x", [override]).unlisted
    except InvalidJob as error:
        faults = error.errors
    return [(fault.where, fault.what) for fault in faults]


@pytest.mark.parametrize(
    ("override", "where", "fault"),
    [
        ("lrr=1", "lrr", "unknown key 'lrr'; did you mean 'lr'? (write +lrr=... to add it)"),
        ("data.trian=x", "data.trian", "unknown key 'trian'; did you mean 'train'?"),
        ("dta.train=x", "dta.train", "unknown key 'dta'; did you mean 'data'?"),
        ("lr.deep=1", "lr.deep", "unknown key 'deep'"),
        ("workload.rolout.num=1", "workload.rolout.num", "unknown key 'rolout'; did you mean 'rollout'?"),
        ("workload.rollout.num=-1", "workload.rollout.num", "greater than 0, got -1"),
        ("lr", "lr", "an override is written key=value"),
        ("=3", "=3", "an override is written key=value"),
        ("lr=[1", "lr", "while parsing a flow sequence"),
        ("sizes.2=1", "sizes.2", "unknown key '2'"),
        ("trainer=5", "trainer", "must be a mapping with module, class, "),
        ("+sizes.7=1", "sizes.7", "list index out of range"),
    ],
)
def test_wrong_override_is_answered_with_the_nearest_name(override, where, fault):
    faults = faults_of(override)
    assert any(place == where and fault in text for place, text in faults), faults


@pytest.mark.parametrize("override", ["data.rows=3", "config.data.rows=3", "config.trainer.rows=3"])
def test_override_of_an_unlisted_key_is_left_to_the_trainer(override):
    job = load_job_text(JOB, "x", [override])
    assert [fault.where for fault in job.unlisted] == [override.partition("=")[0]]


def test_wrong_overrides_and_file_are_reported_together(job_file):
    path = job_file(JOB.replace("class: T", "clas: T"))
    with pytest.raises(InvalidJob) as raised:
        load_job(path, ["lrr=1", "nothing"])
    assert [fault.where for fault in raised.value.errors] == ["nothing", "trainer.class", "trainer.clas"]
    assert [fault.where for fault in raised.value.salvaged.unlisted] == ["lrr"]


# -- references -------------------------------------------------------------------------------------------------------


def test_layout_may_refer_to_environment_and_config(monkeypatch):
    monkeypatch.setenv("MY_NODES", "3")
    monkeypatch.setenv("DLROVER_RL_ALLOW_RESOLVERS", "1")
    parts = 'node_number: "${oc.decode:${oc.env:MY_NODES}}", device_per_node: "${config.sizes.1}"'
    job = load_job_text(JOB.replace("device_per_node: 4", parts), "x")
    assert (job.trainer.node_number, job.trainer.device_per_node) == (3, 2)
    assert load_job_text(JOB.replace("1e-3", "${trainer.device_per_node}"), "x").config.lr == 4


def test_broken_references_of_the_layout_have_their_places():
    text = JOB.replace("class: T", "class: '${nothing}'").replace("num: 2", "num: '???'")
    assert [where for where, _ in problems_of(load_job_text, text, "x")] == ["trainer.class", "workload.actor.num"]


@pytest.mark.parametrize("wrong", ["'${a'", "'${}'", "'${lr..}'"])
def test_malformed_reference_is_one_error_of_the_file(monkeypatch, wrong):
    text = JOB.replace("class: T", f"class: {wrong}").replace("num: 2", "nmu: 2").replace("[1, 2]", f"[1, {wrong}]")
    text = text.replace("module: m, class: R", "module: '${config.lr}x', class: '\\${a'")
    assert problems_of(load_job_text, text, "x", ["nothing"]) == [
        ("trainer.class", MALFORMED),
        ("config.sizes.1", MALFORMED),
        ("nothing", "an override is written key=value"),
        ("workload.actor.nmu", "unknown key 'nmu'; did you mean 'num'?"),
    ]
    with pytest.raises(InvalidJob) as caught:
        load_job_text(JOB.replace("[1, 2]", f"[1, {wrong}]").replace("class: R", "class: '\\${a'"), "x")
    job = caught.value.salvaged
    assert (job.config.sizes, job.workloads["ROLLOUT"].class_) == ([1, None], "${a")


@pytest.mark.parametrize(
    ("text", "place"),
    [(JOB.replace("class: T", "class: '${oc.env:HOME}'"), "trainer.class"), (f"{NO_CONFIG}config: ${{env}}", "config")],
)
def test_resolver_and_wrong_config_hide_no_other_errors(text, place):
    places = [where for where, _ in problems_of(load_job_text, text.replace("num: 2", "nmu: 2"), "x")]
    assert places == [place, "workload.actor.nmu"]


# -- anything ---------------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=8)
WORDS = "trainer workload workload_group env restart config actor num class module resource per_node mem name class_"
KEYS = st.sampled_from(WORDS.split()) | st.text(max_size=5)
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4))
JOBS = st.fixed_dictionaries({}, optional={"trainer": TREES, "workload": TREES, "workload_group": TREES, "env": TREES})
OVERRIDE = st.text(max_size=12) | st.from_regex(r"\+?[a-z.]{1,8}=[a-z0-9\[\{:\$ ]{0,8}", fullmatch=True)


@example({"[": None}, [])
@given(JOBS | TREES, st.lists(OVERRIDE, max_size=3))
def test_any_tree_and_overrides_are_a_job_or_an_invalid_job(tree, overrides):
    for text, changes in ((yaml.safe_dump(tree), []), (JOB, overrides)):
        try:
            load_job_text(text, "x", changes, search_path=())
        except InvalidJob as error:
            assert error.errors


@pytest.mark.parametrize(
    ("overrides", "places"),
    [
        (["+env.API_KEY:canary"], ["+env.API_KEY"]),
        (["env.API_KEY: c2FuYXJ5canary=="], ["env.API_KEY"]),
        (["judge.api_key:canary=="], ["judge.api_key"]),
        (["--api-key", "canary"], ["--api-key", "***"]),
        (["env.API_KEY", "=", "canary"], ["env.API_KEY", "***"]),
        (["https://canary@host"], ["https"]),
        (["lr", "canary"], ["lr", "canary"]),
    ],
)
def test_malformed_override_does_not_show_a_secret(job_file, overrides, places):
    problems = problems_of(load_job, job_file(), overrides)
    assert problems == [(place, "an override is written key=value") for place in places]
    hidden, (_, shown) = problems_of(load_job, job_file(), ["+judge.api_key=${canary", "+judge.name=${canary"])
    assert hidden == ("judge.api_key", "is not valid YAML") and shown != "is not valid YAML"


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
REFUSED = {
    "large": ("x: " + "y" * 1_000_001, "has 1000004 bytes, a job file has at most 1000000"),
    "many keys": ("config:\n" + "".join(f"  k{n}: 1\n" for n in range(MAX_NODES)), "more than 50000 keys and values"),
    "deep list": ("x: " + "[" * 20_000, "is nested more than 50 levels deep"),
    "deep mapping": ("x: " + "{a: " * 60 + "1" + "}" * 60, "is nested more than 50 levels deep"),
    "alias bomb": (BOMB, "has more than 100 aliases"),
    "python tag": ("x: !!python/object/apply:os.system ['true']", "the tag python/object/apply:os.system is not all"),
    "own tag": ("x: !mine 3", "the tag !mine is not allowed"),
}


@pytest.mark.parametrize("text, fault", REFUSED.values(), ids=REFUSED)
def test_limits_refuse_a_hostile_file_quickly_in_one_line(text, fault):
    with within(2.0):
        ((_, problem),) = problems_of(load_job_text, text, "job")
    assert fault in problem and "\n" not in problem


def test_limits_pass_an_ordinary_file():
    check_text("x: &a {k: 1}\ny: *a\nz: !!str 3\n" + "deep: " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1), "job")
    check_text("x: [unclosed", "job")  # the loader says what is wrong with it


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
def test_resolvers_differ_from_references(text, name):
    calls = [error.what.partition(",")[0] for error in validate_resolvers({"x": text})]
    named = f"the resolver {name!r}" if name else "a resolver"
    assert calls == ([] if name is None else [f"calls {named}"])


@pytest.mark.parametrize(
    ("text", "overrides", "fault"),
    [
        ("config: {key: '${oc.env:HOME}'}", [], "config.key: calls the resolver 'oc.env', which may read"),
        ("config: {key: 1}", ["key=${oc.env:HOME}"], "config.key: calls the resolver 'oc.env'"),
        ("config: {key: 1}", [r'key=[1, {deep: "\x24{oc.env:HOME}"}]'], "config.key.1.deep: calls the resolver"),
        ('"": ${:0}', [], "calls a resolver"),
    ],
)
def test_resolvers_are_refused_unless_allowed(monkeypatch, text, overrides, fault):
    with pytest.raises(InvalidJob, match=fault):
        load_job_text(text, "job", overrides)
    monkeypatch.setenv("DLROVER_RL_ALLOW_RESOLVERS", "1")
    with pytest.raises(InvalidJob) as refused:  # only because it lacks the rest of a job
        load_job_text(text.replace(":0", "a"), "job", overrides)
    assert "resolver" not in str(refused.value)
