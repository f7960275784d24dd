"""The unit tests of the control room as checks of any set of its modules, seeded bugs included."""

import itertools
import types
from collections.abc import Iterator
from pathlib import Path

import sim_modules

UNIT = Path(__file__).parents[1] / "unit" / "control"
SPECS = ("test_machine", "test_recovery", "test_journal", "test_liveness")


def broken_by(loaded: dict[str, types.ModuleType]) -> str:
    """The first unit test that fails on these modules, ``""`` when all hold."""
    helpers = _execute("jobs", loaded)
    for name in SPECS:
        tests = _execute(name, {**loaded, "jobs": helpers})
        for test, arguments in _calls(tests):
            try:
                test(**arguments)
            except Exception as error:
                return f"{name}.{test.__name__}: {type(error).__name__}"
            except BaseException as error:
                if type(error).__name__ != "Failed":  # what pytest.raises raises
                    raise
                return f"{name}.{test.__name__}: {error}"
    return ""


def _execute(name: str, loaded: dict[str, types.ModuleType]) -> types.ModuleType:
    path = UNIT / f"{name}.py"
    return sim_modules.execute(name, path.read_text(encoding="utf-8"), str(path), loaded)


def _calls(tests: types.ModuleType) -> Iterator[tuple[types.FunctionType, dict[str, object]]]:
    for name, test in vars(tests).items():
        # Random sequences take long and the simulation has better ones.
        if name.startswith("test_") and not hasattr(test, "hypothesis"):
            marks = [mark.args for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
            for values in itertools.product(*(cases for _, cases in marks)):
                arguments: dict[str, object] = {}
                for (names, _), value in zip(marks, values, strict=True):
                    arguments |= _named(names, value)
                yield test, arguments


def _named(names: object, value: object) -> dict[str, object]:
    if isinstance(names, str):
        return {names: value}
    assert isinstance(names, tuple) and isinstance(value, tuple)
    return dict(zip(names, value, strict=True))
