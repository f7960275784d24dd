# SPDX-License-Identifier: Apache-2.0
"""Models that a run does not train: no commit has their weights, which have to stay as they were when it was begun."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import ConfigError, DataError
from dlrover.python.rl.engine.model.loading import fingerprint_files


class FrozenModels:
    """Part of a trainer's ``state``: a sample of the files of references, teachers and reward models, of those that are
    in folders here."""

    def __init__(self, trainer: Any, cfg: Any) -> None:
        uses = trainer.model_uses(cfg, {role: len(handles) for role, handles in trainer.actor_handles.items()})
        self._models = {str(role): use.model for role, use in uses.items() if use.kind == "frozen"}
        self._fingerprints = {role: _fingerprint(model) for role, model in self._models.items()}

    def state_dict(self) -> dict[str, str]:
        return dict(self._fingerprints)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises DataError if a model has other weights, wherever it is."""
        errors = []
        for role, model in self._models.items():
            was, now = state.get(role, ""), self._fingerprints[role]
            self._fingerprints[role] = now or was  # files that are not here now
            if was and now and was != now:
                what = f"the weights of '{model}', the {role.lower()}, are not those that the run was begun with"
                errors.append(ConfigError("config", what))
        if errors:
            raise DataError(errors)


def _fingerprint(model: str) -> str:
    folder = Path(model).expanduser()
    return fingerprint_files(folder if folder.is_dir() else None)
