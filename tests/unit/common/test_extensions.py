# SPDX-License-Identifier: Apache-2.0
"""Names of extensions: built in, from an installed package, or ``module:Attribute``."""

import sys

import pytest

from dlrover.python.rl.common.errors import ClassNotFound
from dlrover.python.rl.common.extensions import ExtensionPoint, load_object

POINT = ExtensionPoint("parser", "dlrover_rl_test.parsers", {"json": "json:loads"})


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package that registers the parsers ``toml`` and ``json``, as pip would have installed it."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dlrover_rl_test.parsers]\ntoml = tomllib:loads\njson = pickle:loads\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_built_in_name(installed):
    import json

    assert POINT.load("json") is json.loads


def test_a_name_of_an_installed_package(installed):
    import tomllib

    assert POINT.load("toml") is tomllib.loads
    assert sorted(POINT.places()) == ["json", "toml"]


def test_a_module_and_attribute():
    import pickle

    assert POINT.load("pickle:loads") is pickle.loads


def test_a_place_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "never_imported.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert POINT.place("never_imported:Thing") == "never_imported:Thing"
    assert "never_imported" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("jsn", "no parser is called 'jsn'; did you mean 'json'?; there are json, toml, or give 'package.module:Name'"),
        ("zzz", "no parser is called 'zzz'; there are json, toml"),
        ("json:lods", "module 'json' has no 'lods'; did you mean 'loads'?"),
        ("jsom:loads", "no module named 'jsom'; did you mean 'json'?"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, message, installed):
    with pytest.raises(ClassNotFound) as caught:
        POINT.load(name)
    assert message in str(caught.value)


def test_a_module_that_raises_on_import(tmp_path, monkeypatch):
    (tmp_path / "raises_on_import.py").write_text("raise RuntimeError('oh')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ClassNotFound, match="'raises_on_import' cannot be imported: RuntimeError: oh"):
        load_object("raises_on_import:Thing")


def test_a_place_without_an_attribute_is_refused():
    with pytest.raises(ClassNotFound, match="'json' is not of the form 'package.module:Name'"):
        load_object("json")


def test_a_place_of_earlier_versions_is_read_with_a_note(caplog):
    point = ExtensionPoint("parser", "dlrover_rl_test.parsers", {"json": "json:loads"}, {"old.json:loads": "json"})
    assert point.place("old.json:loads") == "json:loads"
    assert "the parser 'old.json:loads' is now called 'json'" in caplog.text
    assert point.place("json") == "json:loads"
