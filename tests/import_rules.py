# SPDX-License-Identifier: Apache-2.0
"""The layers of the package as a checker over source text: no module is imported to be judged."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

from networkx import Graph, connected_components

ROOT = "dlrover.python.rl"

LAYERS = (
    ("common",),
    ("config",),
    ("data",),
    ("control", "trainer"),
    ("runtime", "engine", "environment", "algorithm"),
    ("master", "recipe", "session"),
    ("classic", "page"),
    ("service",),
    ("cli",),
)
LAYER_OF = {package: index for index, layer in enumerate(LAYERS) for package in layer}

CONTROL_HALF = {"trainer", "control", "runtime", "master", "page", "service", "cli"}
MODEL_HALF = {"data", "environment", "algorithm", "engine"}
TENSOR_LIBRARIES = {"torch", "transformers", "tokenizers", "safetensors"}

HOMES = {
    "ray": "runtime", "omegaconf": "config", "pydantic": "config", "grpc": "service", "grpc_health": "service",
    "grpc_reflection": "service", "google": "service", "prometheus_client": "master/process", "starlette": "page",
    "uvicorn": "runtime", "vllm": "engine/vllm",
    "sglang": "engine/sglang", "deepspeed": "engine/deepspeed", "megatron": "engine/megatron", "datasets": "data",
    "pyarrow": "data", "math_verify": "environment", "gem": "environment", "gymnasium": "environment",
    "openai": "environment", "mcp": "environment/agents", "openenv": "environment/agents",
    "reasoning_gym": "environment/agents", "wandb": "recipe", "mlflow": "recipe", "trackio": "recipe",
}  # fmt: skip

GUESTS = {
    ("runtime/ray/cluster/health.py", "grpc"): "asks Ray's GCS as a stranger would",
    ("recipe/rollout/endpoint.py", "starlette"): "answers agents where their tokens are generated",
}
"""Files that import a dependency away from its home, and why."""

DOORS = {("master/main.py", "cli"): "the command line under the name that guides use"}
"""Modules that stand for a higher package, which does not import them."""

CLOCK_THREAD_DISK = {
    "asyncio", "concurrent", "datetime", "io", "multiprocessing", "os", "pathlib", "random", "secrets", "shutil",
    "signal", "socket", "subprocess", "tempfile", "threading", "time", "uuid",
}  # fmt: skip
# The contract waits on refs in an event loop, reads the process's own environment, names the job's folder, and lets
# several threads of a trainer call at once.
ALLOWED_IN_CONTRACT = {
    ("trainer/port.py", "asyncio"), ("trainer/workload.py", "os"), ("trainer/trainer.py", "pathlib"),
    ("trainer/durable.py", "threading"), ("trainer/role_group.py", "threading"),
}  # fmt: skip

# Batches cross the port; the runtimes write the state of workloads of either half.
SHARED_DATA = {"trainer": ("data.batch",), "runtime": ("data.batch", "data.state_tree")}


@dataclass(frozen=True)
class Import:
    """One imported dotted name, ``package.module`` or ``package.module.name``."""

    name: str
    line: int

    @property
    def top(self):
        return self.name.partition(".")[0]

    @property
    def inside(self):
        """The path inside the package's root: ``data.batch.Batch``; None for another package."""
        return self.name.removeprefix(f"{ROOT}.") if self.name.startswith(f"{ROOT}.") else None


def imports_of(tree: ast.AST) -> Iterator[Import]:
    """Every import of a module: at its top, in functions, under TYPE_CHECKING, and by name through importlib.

    Relative and star imports are the linter's.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _function(node) in ("import_module", "__import__") and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield Import(argument.value, node.lineno)


@cache
def _imports_in(source: str) -> tuple[Import, ...]:
    return tuple(imports_of(ast.parse(source)))


def _function(call: ast.Call) -> str:
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


def faults(path: str, source: str) -> list[str]:
    """Everything that the rules say against a file at ``path`` inside ``dlrover/python/rl``, with ``/``."""
    messages = []
    package = PurePosixPath(path).parts[0]
    if package not in LAYER_OF:
        return [f"{path}: '{package}' is not a package of the layers"]
    for item in _imports_in(source):
        judge = _inside if item.top == "dlrover" else _outside
        messages += [f"{path}:{item.line}: {reason} ({item.name})" for reason in judge(path, package, item)]
    return messages


def _inside(path: str, package: str, item: Import) -> list[str]:
    if item.inside is None:
        return ["the front door is for users: import from the package that defines it"]
    other = item.inside.partition(".")[0]
    reasons = []
    if other not in LAYER_OF:
        return [f"'{other}' is not a package of the layers"]
    if (path, other) in DOORS:
        return []
    if other != package and LAYER_OF[other] >= LAYER_OF[package]:
        reasons.append(f"{package} may not import {other}, which is not below it")
    if package in CONTROL_HALF and other in MODEL_HALF and not item.inside.startswith(SHARED_DATA.get(package, ())):
        reasons.append(f"the control half ({package}) may not import the model half ({other})")
    if package in MODEL_HALF and other in CONTROL_HALF:
        reasons.append(f"the model half ({package}) may not import the control half ({other})")
    if path == "data/batch.py" and other == "data":
        reasons.append("data/batch.py is shared by both halves and imports no other data module")
    return reasons


def _outside(path: str, package: str, item: Import) -> list[str]:
    reasons = []
    home = HOMES.get(item.top)
    if home is not None and not path.startswith(f"{home}/") and (path, item.top) not in GUESTS:
        reasons.append(f"{item.top} may be imported in {home}/ only")
    tensor_free = package in CONTROL_HALF | {"common", "config"} or path == "data/batch.py"
    if item.top in TENSOR_LIBRARIES and tensor_free:
        reasons.append(f"{package} may not import {item.top}")
    pure = package == "control" or (package == "trainer" and (path, item.top) not in ALLOWED_IN_CONTRACT)
    if item.top in CLOCK_THREAD_DISK and pure:
        reasons.append(f"{package} knows no clock, thread or disk")
    return reasons


def faults_of_tree(root: Path) -> list[str]:
    """Return the :func:`faults` of every file in a package of the folder ``dlrover``."""
    base = root / "python" / "rl"
    files = {file.relative_to(base).as_posix(): file for file in sorted(base.rglob("*.py")) if file.parent != base}
    return [fault for name, file in files.items() for fault in faults(name, file.read_text(encoding="utf-8"))]


def folder_cycle(root: Path) -> list[str]:
    """A cycle of imports between the folders of the package folder ``dlrover``, empty if there is none.

    A folder and its sub-folders are separate nodes: ``runtime`` and ``runtime/member`` may not import each other.
    """
    base = root / "python" / "rl"
    graph: dict[str, set[str]] = {}
    doors = {base / path for path, _ in DOORS}
    for file, names in _imports_inside(base).items():
        if file not in doors:
            folder = file.parent.relative_to(base).as_posix()
            graph.setdefault(folder, set()).update({_folder_of(base, name) for name in names} - {folder})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _imports_inside(base: Path) -> dict[Path, set[str]]:
    """Return each file of the package, and the names inside the package that it imports."""
    return {
        file: {item.inside for item in _imports_in(file.read_text(encoding="utf-8")) if item.inside}
        for file in sorted(base.rglob("*.py"))
    }


def _folder_of(base: Path, name: str) -> str:
    """The folder of the module that an imported dotted name is, or is in."""
    path = base.joinpath(*name.split("."))
    while not (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()):
        path = path.parent
    folder = path.parent if path.with_suffix(".py").is_file() else path
    return folder.relative_to(base).as_posix()


def separate_parts(root: Path) -> dict[str, list[list[str]]]:
    """Return the groups of modules that no import connects, for each folder of the package that has several.

    A sub-folder counts as one module of its folder. Two modules are in one group if either imports the other.
    """
    base, separate = root / "python" / "rl", {}
    imports = _imports_inside(base)
    for folder in sorted({file.parent for file in imports} - {base}):
        name = folder.relative_to(base).as_posix()
        links: dict[str, set[str]] = {}
        for file in (file for file in imports if file.is_relative_to(folder) and file.name != "__init__.py"):
            module = file.relative_to(folder).parts[0].removesuffix(".py")
            prefix = name.replace("/", ".") + "."
            inside = (other.removeprefix(prefix) for other in imports[file] if other.startswith(prefix))
            links.setdefault(module, set()).update(other.partition(".")[0] for other in inside)
        graph = Graph({module: siblings & links.keys() for module, siblings in links.items()})
        parts = sorted(map(sorted, connected_components(graph)))
        if len(parts) > 1:
            separate[name] = parts
    return separate
