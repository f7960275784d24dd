# SPDX-License-Identifier: Apache-2.0
"""The tiny model and its byte tokenizer."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer, write_tiny_model
from dlrover.python.rl.recipe.tiny import main


@pytest.mark.parametrize("text", ["37+45=82", "naïve 中文 😀", " two  spaces\n\ttab ", "".join(map(chr, range(128)))])
def test_any_text_is_its_bytes_and_comes_back(text):
    tokenizer = make_byte_tokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_single_ids():
    tokenizer = make_byte_tokenizer()
    assert len(tokenizer) == 259
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [256, 257, 258]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.decode([104, 105, 258], skip_special_tokens=True) == "hi"


def test_the_chat_template_is_chatml():
    text = make_byte_tokenizer().apply_chat_template(
        [{"role": "user", "content": "1+1?"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"


def test_the_model_loads_with_the_library_alone(tmp_path):
    path = write_tiny_model(tmp_path / "m", hidden=32, layers=2, intermediate=48, max_positions=64)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.max_position_embeddings == 64
    assert model.config.intermediate_size == 48
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 258
    assert tokenizer.chat_template == make_byte_tokenizer().chat_template


def test_the_default_has_0_6_million_parameters(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "m"))
    assert 0.55e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.65e6


def test_the_seed_decides_the_weights_and_leaves_the_process_alone(tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    shape = {"hidden": 32, "layers": 1}
    files = [
        write_tiny_model(tmp_path / name, seed=seed, **shape) / "model.safetensors"
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    first, same, other = (file.read_bytes() for file in files)
    assert first == same != other
    assert torch.equal(torch.get_rng_state(), before)


def test_writing_again_replaces_the_folder_whole(tmp_path):
    path = write_tiny_model(tmp_path / "m", hidden=32, layers=1)
    (path / "stale.txt").write_text("old")
    write_tiny_model(path, hidden=32, layers=1)
    assert not (path / "stale.txt").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_the_command_line_writes_a_model(tmp_path, capsys):
    out = tmp_path / "deep" / "m"
    assert main(["--out", str(out), "--hidden", "32", "--layers", "1", "--kv-heads", "4"]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert AutoModelForCausalLM.from_pretrained(out).config.num_key_value_heads == 4
