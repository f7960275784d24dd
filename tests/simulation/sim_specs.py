# SPDX-License-Identifier: Apache-2.0
"""The unit tests of the control room as checks of any set of its modules, seeded bugs included."""

import itertools
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import sim_modules

TESTS = Path(__file__).parents[1]
SPECS = ("test_machine", "test_recovery", "test_journal", "test_liveness")


def broken_by(loaded: dict[str, types.ModuleType]) -> str:
    """The first unit test that fails on these modules, ``""`` when all hold."""
    helpers = _execute("support/control_runs", loaded)
    modules = {**loaded, "tests.support.control_runs": helpers}
    for name in SPECS:
        for test, arguments in _calls(_execute(f"unit/control/{name}", modules)):
            try:
                test(**arguments)
            except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 -- a bug shows itself in any way
                return f"{name}.{test.__name__}: {type(error).__name__}"
    return ""


def _execute(name: str, loaded: dict[str, types.ModuleType]) -> types.ModuleType:
    path = TESTS / f"{name}.py"
    return sim_modules.execute(path.stem, path.read_text(encoding="utf-8"), str(path), loaded)


def _calls(tests: types.ModuleType) -> Iterator[tuple[types.FunctionType, dict[str, object]]]:
    """Every test with every combination of its parameters."""
    for name, test in vars(tests).items():
        # Random sequences take long and the simulation has better ones.
        if not name.startswith("test_") or hasattr(test, "hypothesis"):
            continue
        marks = [mark.args for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        for values in itertools.product(*(cases for _, cases in marks)):
            named = [_named(names, value) for (names, _), value in zip(marks, values, strict=True)]
            yield test, {key: value for arguments in named for key, value in arguments.items()}


def _named(names: object, value: object) -> dict[str, object]:
    if isinstance(names, str):
        return {names: value}
    assert isinstance(names, tuple) and isinstance(value, tuple)
    return dict(zip(names, value, strict=True))
