# SPDX-License-Identifier: Apache-2.0
"""Files of models: their weights are whole, their configuration leads somewhere, and the tiny model writes both."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.model.loading import SafetensorsSource, fingerprint_files
from dlrover.python.rl.engine.model.spec import ModelSpec, load_causal_lm
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer, write_tiny_model
from dlrover.python.rl.recipe.base.model_files import validate_model, validate_model_config
from dlrover.python.rl.recipe.tiny import main

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


def test_model_without_weights_is_refused(model):
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


def test_missing_file_of_an_index_is_named(model):
    divide(model)
    assert fault_of(model) == ""
    (model / "other.safetensors").touch()
    assert fault_of(model) == "", "no index names it"
    (model / "b.safetensors").unlink()
    assert fault_of(model) == f"{model} lacks b.safetensors, which {INDEX} names"
    (model / INDEX).write_text("{")
    assert fault_of(model).startswith(f"{model}/{INDEX} cannot be read: ")


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_truncated_file_is_named_by_check_and_engines(model, length):
    file = model / WEIGHTS
    content = file.read_bytes()
    file.write_bytes(content[:length])
    message = fault_of(model)
    if length == -1:
        sizes = f"it has {len(content) - 1:,} bytes, but its header describes {len(content):,}"
        assert message == f"{file} is not whole: {sizes}"
    else:
        assert message.startswith(f"{file} is not a whole safetensors file: its header cannot be read: ")
    from_spec = lambda folder: ModelSpec.of(folder).source_of({}, "")  # noqa: E731
    for read in (SafetensorsSource, fingerprint_files, from_spec, load_causal_lm):
        with pytest.raises(EngineError, match=f"^'{file}' is not a complete safetensors file: "):
            read(model)


# -- config.model_config ----------------------------------------------------------------------------------------------


@pytest.fixture
def here(written, tmp_path, monkeypatch):
    """The current directory, with ``models/small/config.json`` and ``models/notes.txt``."""
    (tmp_path / "models/small").mkdir(parents=True)
    shutil.copy(written / "config.json", tmp_path / "models/small")
    (tmp_path / "models/notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def config_fault(path):
    (error,) = validate_model_config(path)
    assert error.where == "config.model_config"
    return error.what


@pytest.mark.parametrize("path", [None, "models/small", "models/small/config.json"])
def test_existing_model_config_is_no_error(here, path):
    assert validate_model_config(path) == []
    assert validate_model_config(path and str(here / path)) == []


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("models/smal", ", nor a model in this machine's cache of the hub; did you mean 'models/small'?"),
        ("models/small/confg.json", "; did you mean 'models/small/config.json'?"),
        ("./model/small/config.json", "; did you mean 'models'?"),
        ("models/notes.txt/config.json", ""),
        ("zzz.json", ""),
        ("Owner/Model-7B", ", nor a model in this machine's cache of the hub"),
    ],
)
def test_missing_model_config_is_named_with_the_nearest_entry(here, path, advice):
    assert config_fault(path) == f"no such file or folder: {path} in {here}{advice}"


@pytest.mark.parametrize("path", ["models", "models/notes.txt"])
def test_other_file_is_no_model_config(here, path):
    assert config_fault(path) == f"{path} is no config.json of a language model, nor a folder with one"


def test_model_config_may_be_in_the_cache_of_the_hub(here, monkeypatch):
    files = {"Owner/Model": str(here / "models/small/config.json"), "Owner/Other": str(here / "models/notes.txt")}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, file, **_: files.get(model))
    assert validate_model_config("Owner/Model") == []
    assert config_fault("Owner/Other").startswith("Owner/Other is no config.json of a language model")


@pytest.mark.parametrize("text", ["37+45=82", "naïve 中文 😀", " two  spaces\n\ttab ", "".join(map(chr, range(128)))])
def test_byte_tokenizer_round_trips_any_text(text):
    tokenizer = make_byte_tokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_of_the_byte_tokenizer_are_single_ids():
    tokenizer = make_byte_tokenizer()
    assert len(tokenizer) == 259
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [256, 257, 258]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.decode([104, 105, 258], skip_special_tokens=True) == "hi"


def test_tiny_model_loads_with_the_library_alone(tmp_path):
    path = write_tiny_model(tmp_path / "m", hidden=32, layers=2, intermediate=48, max_positions=64)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.max_position_embeddings, model.config.intermediate_size) == (64, 48)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 258
    assert tokenizer.chat_template == make_byte_tokenizer().chat_template


def test_seed_of_the_tiny_model_decides_its_weights(tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    seeds = {"a": 1, "b": 1, "c": 2}
    models = [write_tiny_model(tmp_path / name, hidden=32, layers=1, seed=seed) for name, seed in seeds.items()]
    first, same, other = ((model / WEIGHTS).read_bytes() for model in models)
    assert first == same != other
    assert torch.equal(torch.get_rng_state(), before)


def test_writing_a_tiny_model_replaces_the_folder(tmp_path):
    path = write_tiny_model(tmp_path / "m", hidden=32, layers=1)
    (path / "stale.txt").write_text("old")
    write_tiny_model(path, hidden=32, layers=1)
    assert not (path / "stale.txt").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_command_line_writes_a_tiny_model(tmp_path, capsys):
    out = tmp_path / "deep" / "m"
    assert main(["--out", str(out), "--hidden", "32", "--layers", "1", "--kv-heads", "4"]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert AutoModelForCausalLM.from_pretrained(out).config.num_key_value_heads == 4
