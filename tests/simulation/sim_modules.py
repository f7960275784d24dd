# SPDX-License-Identifier: Apache-2.0
"""The production modules under simulation, loaded apart from everybody else's: on a simulated disk, and with a seeded
bug where one is asked for."""

import builtins
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sim_disk

ROOT = "dlrover.python.rl"
HERE = Path(__file__).resolve().parents[2]

PRIVATE = (
    "control.state",
    "control.recovery",
    "control.machine",
    "control.journal",
    "control.liveness",
    "runtime.checkpoint.journal_store",
    "master.process.brain",
)
"""In the order of their imports. Events are everybody's: they are only words."""


@dataclass(frozen=True)
class Mutation:
    """A seeded bug: ``old`` in a module's source becomes ``new``."""

    module: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        if source.count(self.old) != 1:
            raise LookupError(f"{self.module} holds {source.count(self.old)} times: {self.old!r}")
        return source.replace(self.old, self.new)


def source_of(name: str) -> str:
    return path_of(name).read_text(encoding="utf-8")


def path_of(name: str) -> Path:
    return HERE.joinpath(*ROOT.split("."), *name.split(".")).with_suffix(".py")


def load(*mutations: Mutation) -> types.SimpleNamespace:
    """A set of production modules of its own, by the last part of their names: ``load().machine.step``."""
    return by_last_name(load_all(*mutations))


def by_last_name(loaded: dict[str, types.ModuleType]) -> types.SimpleNamespace:
    """Modules as attributes."""
    return types.SimpleNamespace(**{name.rpartition(".")[2]: module for name, module in loaded.items()})


def load_all(*mutations: Mutation) -> dict[str, types.ModuleType]:
    """The same, by their full names."""
    loaded: dict[str, types.ModuleType] = {}
    for name in PRIVATE:
        source = source_of(name)
        for mutation in mutations:
            if mutation.module == name:
                source = mutation.apply(source)
        loaded[f"{ROOT}.{name}"] = execute(f"{ROOT}.{name}", source, str(path_of(name)), loaded)
    return loaded


def execute(name: str, source: str, path: str, loaded: dict[str, types.ModuleType]) -> types.ModuleType:
    """Run a module's source with its imports of ``loaded`` modules going there."""
    module = types.ModuleType(name)
    on_disk = name.endswith("journal_store")

    def importing(wanted: str, *rest: Any) -> Any:
        names = rest[2] if len(rest) > 2 else ()
        if wanted in loaded:
            return loaded[wanted]
        inside = {item: loaded[f"{wanted}.{item}"] for item in names or () if f"{wanted}.{item}" in loaded}
        if inside:
            package = builtins.__import__(wanted, *rest)
            return types.SimpleNamespace(**{item: inside.get(item) or getattr(package, item) for item in names})
        if on_disk and wanted in sim_disk.SUBSTITUTES:
            return sim_disk.SUBSTITUTES[wanted]
        return builtins.__import__(wanted, *rest)

    spaces = {**vars(builtins), "__import__": importing}
    if on_disk:
        spaces["open"] = sim_disk.open_file
    module.__dict__.update(__builtins__=spaces, __file__=path)
    exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102 -- the repository's own source
    return module
