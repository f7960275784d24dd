# SPDX-License-Identifier: Apache-2.0
"""The package. Importing a name of upstream DLRover or RLite that is elsewhere here names its new place."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
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
        """Raises ModuleNotFoundError for a module that is elsewhere."""
        place = _MODULES.get(name.removeprefix(_PACKAGE)) if name.startswith(_PACKAGE) else None
        if place is not None:
            raise ModuleNotFoundError(f"there is no module '{name}'; use {place}", name=name)
        return None


if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
    sys.meta_path.append(MovedModules())
