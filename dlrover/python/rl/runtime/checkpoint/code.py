# SPDX-License-Identifier: Apache-2.0
"""Digests of the code that computes a job's steps, which a commit keeps: a resume names what has changed since."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.names import installed_versions
from dlrover.python.rl.config.plain import salvage_plain
from dlrover.python.rl.config.spec import JobSpec

_PACKAGES = ("dlrover-rl", "torch", "transformers", "numpy", "vllm", "sglang", "deepspeed", "megatron-core")
_VERSIONED = {"dlrover", "megatron", *_PACKAGES}  # packages whose sources are not read
_REFERENCE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")  # "package.module:name", as job files name functions


def digest_code(job: JobSpec) -> dict[str, dict[str, str]]:
    """Digest the ``modules`` that the job names or imports from its folders, with the ``versions`` of packages."""
    folders = [Path(job.work_dir), *map(Path, job.search_path)]
    config = salvage_plain(job.config, [])
    names = {job.trainer.module, *(spec.module for spec in job.workloads.values()), *_referenced(config)}
    modules: dict[str, str] = {}
    _add_modules(names, folders, modules)
    return {"modules": modules, "versions": installed_versions(_PACKAGES)}


def describe_changes(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> str:
    """Name the differences for people; empty if there are none or ``before`` is unknown."""
    if not before:
        return ""
    old, new = before["modules"], now["modules"]
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    versions = sorted(before["versions"].keys() | now["versions"].keys())
    pairs = [(name, before["versions"].get(name, "none"), now["versions"].get(name, "none")) for name in versions]
    return ", ".join([*names, *(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)])


def _referenced(config: Any) -> Iterator[str]:
    """Yield the modules of all functions and classes that a configuration names."""
    if isinstance(config, str):
        if match := _REFERENCE.fullmatch(config):
            yield match[1]
    elif isinstance(config, Mapping):
        yield from _referenced([*config, *config.values()])
    elif isinstance(config, Sequence):
        for item in config:
            yield from _referenced(item)


def _add_modules(names: Iterable[str], folders: list[Path], modules: dict[str, str]) -> None:
    for name in names:
        parts = list(filter(None, name.split(".")))
        if name in modules or not parts or parts[0] in _VERSIONED:
            continue
        paths = [folder.joinpath(*parts) for folder in folders]
        files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
        if files:
            source = files[0].read_bytes()
            modules[name] = sha256(source).hexdigest()[:16]
            _add_modules(_imports(source, name, files[0].stem == "__init__"), folders, modules)


def _imports(source: bytes, name: str, is_package: bool) -> Iterator[str]:
    """Yield the absolute names of the modules that a module may import."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".")
            parents = parts[: len(parts) - node.level + is_package] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
