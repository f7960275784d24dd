# SPDX-License-Identifier: Apache-2.0
"""The files of a model's weights are there and whole, or the job is refused before anything starts."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.model.loading import SafetensorsSource, fingerprint_files
from dlrover.python.rl.engine.model.spec import ModelSpec, load_causal_lm
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.base.model_files import validate_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=32, layers=1)


@pytest.fixture
def model(written, tmp_path):
    return shutil.copytree(written, tmp_path / "tiny")


def fault_of(model):
    errors = validate_model(str(model), "config.teacher")
    assert {error.where for error in errors} <= {"config.teacher"}
    return "; ".join(error.what for error in errors)


def divide(model):
    """Two files of weights, and the index that names them."""
    tensors = sorted(load_file(model / WEIGHTS).items())
    files = {"a.safetensors": tensors[::2], "b.safetensors": tensors[1::2]}
    for file, part in files.items():
        save_file(dict(part), model / file, {"format": "pt"})
    (model / WEIGHTS).unlink()
    weight_map = {name: file for file, part in files.items() for name, _ in part}
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_model_without_weights_is_refused(model):
    assert fault_of(model) == ""
    weights = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    assert fault_of(model) == f"{model} holds no weights: no *.safetensors and no pytorch_model.bin"
    torch.save(weights, model / "pytorch_model.bin")
    assert fault_of(model) == ""
    (model / "pytorch_model.bin").rename(model / "pytorch_model-1.bin")
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model-1.bin"}}))
    assert fault_of(model) == ""
    (model / "pytorch_model-1.bin").unlink()
    assert fault_of(model) == f"{model} lacks pytorch_model-1.bin, which pytorch_model.bin.index.json names"


def test_every_file_that_the_index_names_is_there(model):
    divide(model)
    assert fault_of(model) == ""
    (model / "other.safetensors").touch()
    assert fault_of(model) == "", "no index names it"
    (model / "b.safetensors").unlink()
    assert fault_of(model) == f"{model} lacks b.safetensors, which {INDEX} names"
    (model / INDEX).write_text("{")
    assert fault_of(model).startswith(f"{model}/{INDEX} cannot be read: ")


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_file_that_is_cut_off_is_named_by_the_check_and_by_the_engines(model, kept):
    file = model / WEIGHTS
    content = file.read_bytes()
    file.write_bytes(content[:kept])
    said = fault_of(model)
    if kept == -1:
        sizes = f"it has {len(content) - 1:,} bytes, but its header describes {len(content):,}"
        assert said == f"{file} is not whole: {sizes}"
    else:
        assert said.startswith(f"{file} is not a whole safetensors file: its header cannot be read: ")
    readers = (
        SafetensorsSource,
        fingerprint_files,
        lambda folder: ModelSpec.of(folder).source_of({}, ""),
        load_causal_lm,
    )
    for read in readers:
        with pytest.raises(EngineError, match=f"^'{file}' is not a complete safetensors file: "):
            read(model)


def test_a_pointer_of_git_lfs_is_no_file_of_weights(model):
    (model / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert fault_of(model).startswith(f"{model / WEIGHTS} is not a whole safetensors file")
