# SPDX-License-Identifier: Apache-2.0
"""Other names: keys of RL2, TRL, OpenRLHF and verl, which are read as ours or answered with the place to look; former
names of metrics. They are in ``other_names.yaml``."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import yaml

from dlrover.python.rl.config.typed import Translation

_NAMES: Mapping[str, Any] = yaml.safe_load((files(__package__) / "other_names.yaml").read_text(encoding="utf-8"))


def _invert(section: str) -> dict[str, str]:
    return {name: ours for ours, names in _NAMES[section].items() for name in names}


EXAMPLE_NAMES: Mapping[str, str] = {**_invert("all"), **_invert("examples")}
"""Keys of recipes that learn from examples."""

POLICY_NAMES: Mapping[str, str | Translation] = {
    **_invert("all"),
    **_invert("policy"),
    **{name: Translation(ours["key"], ours["values"]) for name, ours in _NAMES["translated"].items()},
}
"""Keys of recipes that learn from samples."""

ELSEWHERE: Mapping[str, str] = _invert("answered")
"""Answers to keys that have no equal."""

DISTILLATION_NAMES: Mapping[str, str | Translation] = {
    name: ours for name, ours in POLICY_NAMES.items() if name not in _NAMES["answered in distillation"]
}
"""Keys of the recipe that learns from teachers."""

DISTILLATION_ELSEWHERE: Mapping[str, str] = {**ELSEWHERE, **_NAMES["answered in distillation"]}
"""Answers to keys there."""

METRIC_NAMES: Mapping[str, str] = _invert("metrics")
"""The name of each metric that had another one; ``keep.best`` may be either."""
