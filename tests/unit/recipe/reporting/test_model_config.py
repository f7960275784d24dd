# SPDX-License-Identifier: Apache-2.0
"""What is wrong with ``config.model_config`` is said before the start: it leads nowhere, or to something else."""

import json

import pytest

from dlrover.python.rl.recipe.base.model_files import validate_model_config

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current directory, with ``models/small/config.json`` and ``models/notes.txt``."""
    (tmp_path / "models/small").mkdir(parents=True)
    (tmp_path / "models/small/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "models/notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def what_of(given):
    (error,) = validate_model_config(given)
    assert error.where == "config.model_config"
    return error.what


@pytest.mark.parametrize("given", [None, "models/small", "models/small/config.json"])
def test_a_configuration_that_is_there_is_no_error(here, given):
    assert validate_model_config(given) == []
    assert validate_model_config(given and str(here / given)) == []


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("models/smal", ", nor a model in this machine's cache of the hub; did you mean 'models/small'?"),
        ("models/small/confg.json", "; did you mean 'models/small/config.json'?"),
        ("./model/small/config.json", "; did you mean 'models'?"),
        ("models/notes.txt/config.json", ""),
        ("zzz.json", ""),
        ("Owner/Model-7B", ", nor a model in this machine's cache of the hub"),
    ],
)
def test_a_relative_path_that_leads_nowhere_is_named_with_its_directory_and_the_nearest_entry(here, given, advice):
    assert what_of(given) == f"no such file or folder: {given} in {here}{advice}"


def test_an_absolute_path_that_leads_nowhere_is_named_alone(here):
    given = here / "models/smal/config.json"
    assert what_of(str(given)) == f"no such file or folder: {given}; did you mean '{here / 'models/small'}'?"


@pytest.mark.parametrize("given", ["models", "models/notes.txt"])
def test_what_is_there_and_has_no_shape_is_something_else(here, given):
    assert what_of(given) == f"{given} is no config.json of a language model, nor a folder with one"


def test_a_name_of_the_hub_counts_where_its_configuration_is_in_the_cache(here, monkeypatch):
    found = {"Owner/Model": str(here / "models/small/config.json"), "Owner/Other": str(here / "models/notes.txt")}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, file, **_: found.get(model))
    assert validate_model_config("Owner/Model") == []
    assert what_of("Owner/Other").startswith("Owner/Other is no config.json of a language model")
