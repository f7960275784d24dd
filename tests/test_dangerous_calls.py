# SPDX-License-Identifier: Apache-2.0
"""Nothing that can run code from data is called, except in the places below, each with its reason."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dlrover"

ALLOWED = {
    "runtime/member/arguments.py: pickle.loads": "arguments of calls, which Ray's own RPC has brought",
    "runtime/member/host.py: cloudpickle.loads": "an exception that this process itself has just pickled",
    "runtime/torchrun/links.py: pickle.loads": "messages of ranks that have shown the run's secret",
    "environment/sandbox/child_process.py: pickle.load": "in the child: requests of its parent",
    "environment/verifiers/code_tests.py: exec": "the program that is tested, in its confined process",
    "engine/module/engine.py: cloudpickle.loads": "the module that the caller handed over, by Ray's own RPC",
    "engine/weight_sync/cuda_ipc.py: pickle.loads": "a handle from a process of this user, by the kernel's word",
    "recipe/scripts.py: pickle.load": "in the child: the config that its parent sends",
    "common/by_value.py: pickle.loads": "a script's own functions, in a private folder of this run",
    "master/client/supervisor.py: cloudpickle.loads": "in the child: the job that its parent has checked",
}

DANGEROUS = {
    *(f"{module}.{name}" for module in ("pickle", "cloudpickle", "marshal", "dill") for name in ("load", "loads")),
    *("pickle.Unpickler", "shelve.open", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"),
    *("eval", "exec", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("joblib.load", "numpy.load", "np.load"),
}


def dangers(text):
    """The dangerous calls of a module, as ``pickle.loads``."""
    tree = ast.parse(text)
    yield from named(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from options_of(node)


def named(tree):
    imported, bound = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {(alias.asname or alias.name): alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {(alias.asname or alias.name): f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            head, dot, rest = ast.unparse(node).partition(".")
            full = imported.get(head, head) + dot + rest
            if full in DANGEROUS and full not in bound:
                yield full


def options_of(call):
    options = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
    if options.get("shell"):
        yield "shell=True"
    if ast.unparse(call.func) == "torch.load" and options.get("weights_only") is not True:
        yield "torch.load without weights_only"
    if options.get("trust_remote_code"):
        yield "trust_remote_code"


def found():
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix().removeprefix("python/rl/")
        for danger in dangers(path.read_text(encoding="utf-8")):
            yield f"{place}: {danger}"


def test_nothing_runs_code_from_data_but_where_there_is_a_reason():
    assert set(found()) == set(ALLOWED)


@pytest.mark.parametrize(
    ("text", "danger"),
    [
        ("import pickle\npickle.loads(b'')", "pickle.loads"),
        ("from pickle import loads as read\nread(b'')", "pickle.loads"),
        ("import pickle as p\nreader = p.load", "pickle.load"),
        ("eval('1')", "eval"),
        ("import subprocess\nsubprocess.run('x', shell=True)", "shell=True"),
        ("import torch\ntorch.load('x')", "torch.load without weights_only"),
        ("import torch\ntorch.load('x', weights_only=False)", "torch.load without weights_only"),
        ("import yaml\nyaml.load('x', Loader=yaml.Loader)", "yaml.load"),
        ("m.from_pretrained('x', trust_remote_code=True)", "trust_remote_code"),
    ],
)
def test_a_new_one_would_be_found(text, danger):
    assert list(dangers(text)) == [danger]


def test_safe_ones_are_not_found():
    assert not list(
        dangers("import torch\ntorch.load('x', weights_only=True)\nmodel.eval()\nimport json\njson.loads('1')")
    )


def test_tokens_are_compared_in_constant_time():
    """No ``==`` touches one."""
    for path in sorted((PACKAGE / "python/rl").rglob("*.py")):
        if not {"service", "metrics.py", "torchrun"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
                words = ast.unparse(node).lower()
                is_secret = any(word in words for word in ("secret", "sha256", "digest(", "bearer"))
                assert not is_secret, f"{path}:{node.lineno}: {words}"
