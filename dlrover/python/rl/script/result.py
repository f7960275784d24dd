# SPDX-License-Identifier: Apache-2.0
"""What a training run has left."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrover.python.rl.common.errors import MissingExtra

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class TrainResult:
    """A finished run, read from its folder."""

    folder: Path

    @property
    def model(self) -> Path:
        """The folder of the trained model and its tokenizer, in Hugging Face format."""
        return self.folder / "model"

    @property
    def summary(self) -> dict[str, Any]:
        """Scores before and after, and what is known of the data and engines."""
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        return summary

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each step; null values are None."""
        return self._rows("metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Prompts, completions and rewards, of recipes that sample."""
        return self._rows("samples.jsonl")

    @property
    def metrics(self) -> "DataFrame":
        """:attr:`steps` as a table, indexed by step. Raises MissingExtra without pandas."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtra("pandas", "data") from error
        return pd.DataFrame(self.steps).set_index("step")

    @property
    def plots(self) -> list[Path]:
        """The curves, with the extra ``plot``."""
        return sorted(self.folder.glob("*.png"))

    def _rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text(encoding="utf-8").splitlines()]

    def __repr__(self) -> str:
        return f"TrainResult({str(self.folder)!r})"
