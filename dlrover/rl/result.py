# SPDX-License-Identifier: Apache-2.0
"""The results of a training run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrover.python.rl.common.errors import MissingExtra

if TYPE_CHECKING:
    from pandas import DataFrame

_SUMMARY = "summary.json"


@dataclass(frozen=True)
class TrainResult:
    """A finished run, read from its folder."""

    folder: Path

    @property
    def model(self) -> Path:
        """The folder of the trained model and its tokenizer, or the evaluated model of a run that only evaluated."""
        trained = self.folder / "model"
        return Path(self.summary["model"]) if self._has_ended and not trained.exists() else trained

    @property
    def summary(self) -> dict[str, Any]:
        """The final metrics by the names of :attr:`metrics`, the metrics before training as ``before/...``, and counts
        of the data. Undefined values are None."""
        summary: dict[str, Any] = json.loads((self.folder / _SUMMARY).read_text(encoding="utf-8"))
        return summary

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each training step; empty for a run that only evaluated."""
        return [row for row in self._rows("metrics.jsonl") if row["step"]]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Prompts, completions and rewards, for recipes that sample."""
        return self._rows("samples.jsonl")

    @property
    def metrics(self) -> "DataFrame":
        """The metrics by step; 0 is the evaluation before training, if the recipe samples. Needs pandas."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtra("pandas", "data") from error
        return pd.DataFrame(self._rows("metrics.jsonl") or {"step": []}).set_index("step")

    @property
    def plots(self) -> list[Path]:
        """The plotted curves, if the extra ``plot`` is installed."""
        return sorted(self.folder.glob("*.png"))

    @property
    def _has_ended(self) -> bool:
        return (self.folder / _SUMMARY).exists()

    def _rows(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        if self._has_ended and not file.exists():
            return []
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def __repr__(self) -> str:
        return f"TrainResult({str(self.folder)!r})"
