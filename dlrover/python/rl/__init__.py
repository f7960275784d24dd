# SPDX-License-Identifier: Apache-2.0
"""The package. Importing a name of upstream DLRover or RLite that is elsewhere here names its new place.

Two distributions have it: ``dlrover-rl`` is complete, ``dlrover-rl-core`` lacks the library of engines and recipes."""

import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_PACKAGE = "dlrover.python.rl."

_MODULES = {
    "api": "RLJobBuilder, RLJob: from dlrover.rl import RLJobBuilder, RLJob",
    "driver": "the command 'dlrover-rl submit', which takes its options",
    "common.enums": "RLRoleType: from dlrover.rl import RLRoleType",
    "common.roles": "RLRoleType: from dlrover.rl import RLRoleType",
    "common.args": "the command 'dlrover-rl submit', which takes its options",
    "session.train": "TrainEngine: from dlrover.rl import TrainEngine",
    "session.inference": "InferenceEngine: from dlrover.rl import InferenceEngine",
    "recipe.offline.examples": "dlrover.python.rl.recipe.trainers.examples",
    "recipe.offline.example_trainer": "dlrover.python.rl.recipe.trainers.example_trainer",
    "recipe.base.data_config": "dlrover.python.rl.recipe.base.config",
    "trainer.example": "the folders examples/openrlhf and examples/verl of the repository",
}

_LIBRARY = ("algorithm", "classic", "engine", "environment", "recipe", "session")
"""The packages that the core lacks; it also lacks most modules of ``data``."""

IS_CORE = not (Path(__file__).parent / "recipe").is_dir()


_RLITE_NAMES = {
    "RliteInferenceEngine": "InferenceEngine",
    "RliteTrainEngine": "TrainEngine",
    "HuggingFaceFsdp2TrainModule": "TrainModule",
}


def no_attribute(module: str, name: str) -> Exception:
    """The error for a name that ``module`` does not have. One of RLite's is an ImportError, since ``from module import
    name`` replaces the text of an AttributeError."""
    if name in _RLITE_NAMES:
        return ImportError(f"module '{module}' has no '{name}'; use '{_RLITE_NAMES[name]}'", name=module)
    return AttributeError(f"module '{module}' has no attribute '{name}'")


class MovedModules:
    """A finder that finds nothing: the last of ``sys.meta_path``, for names that no other one has found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError for a module that is elsewhere, LibraryMissing for one that the core lacks."""
        inside = name.removeprefix(_PACKAGE) if name.startswith(_PACKAGE) else ""
        if IS_CORE and (inside in _LIBRARY or inside.startswith("data.")):
            from dlrover.python.rl.common.errors import LibraryMissing

            message = f"'{name}' is part of dlrover-rl, and only dlrover-rl-core is installed here"
            raise LibraryMissing(message, name=name)
        place = _MODULES.get(inside)
        if place is not None:
            raise ModuleNotFoundError(f"there is no module '{name}'; use {place}", name=name)
        return None


# Their files are the same, and uninstalling one of them removes the files of both.
if all(any(metadata.distributions(name=name)) for name in ("dlrover-rl", "dlrover-rl-core")):
    raise ImportError("dlrover-rl and dlrover-rl-core are both installed: uninstall both, and install one of them")

if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
    sys.meta_path.append(MovedModules())
