# SPDX-License-Identifier: Apache-2.0
"""What the SGLang engine reads back after a weight sync, of models that SGLang can read and of others."""

import logging

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.weights import take_snapshot
from dlrover.python.rl.engine.model.loading import write_atomically
from dlrover.python.rl.engine.model.spec import load_causal_lm
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer, tiny_config
from dlrover.python.rl.engine.sglang.engine import SglangRolloutEngine
from tests.support import sglang_stand_in

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(tokenizer, **changes):
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **ids, **SHAPE | changes))


MODELS = {
    "llama": llama,
    "llama whose heads are wider": lambda tokenizer: llama(tokenizer, head_dim=16),
    "qwen2": lambda tokenizer: Qwen2ForCausalLM(tiny_config(tokenizer, **SHAPE)),
}


class Served:
    """A model in a folder, the server that stands in, and an engine over it."""

    def __init__(self, name, path):
        torch.manual_seed(0)
        tokenizer = make_byte_tokenizer()
        self.path = write_atomically(path, MODELS[name](tokenizer), tokenizer)
        self.stand_in, self.url, self.end = sglang_stand_in.serve(path)
        self.engine = self.connect()

    def connect(self, **settings):
        return SglangRolloutEngine(self.path, RolloutSettings(max_batch=4, backend={"url": self.url}, **settings))

    def snapshot(self, version, scale=1.0):
        named = load_causal_lm(self.path).named_weights()
        return take_snapshot(((name, tensor * scale) for name, tensor in named), version)

    def reads(self):
        return self.stand_in.said.count("/get_weights_by_name")


@pytest.fixture
def served(request, tmp_path):
    made = Served(request.param, tmp_path / "T")
    yield made
    made.engine.close()
    made.end()


def generate(engine):
    prompts = Batch({"prompt_id": np.arange(2), "tokens": Ragged.from_rows([[5, 6], [7, 8, 9]])})
    return engine.generate(prompts, SamplingParams(max_new_tokens=3), (0,))


@pytest.mark.feature(104)
@pytest.mark.parametrize("served", ["llama"], indirect=True)
def test_weights_that_did_not_arrive_everywhere_are_not_served(served, caplog):
    engine = served.engine
    engine.receive(served.snapshot(0))
    names = ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.v_proj.weight")
    for name, scale in zip(names, (1.1, 1.2), strict=True):
        served.stand_in.deaf = (name,)
        with pytest.raises(WeightSyncError, match=f"the SGLang server has other values of '{name}'$"):
            engine.receive(served.snapshot(1, scale))
        assert engine.version == -1
    with pytest.raises(EngineError, match="receive them again"):
        generate(engine)
    served.stand_in.deaf = ()
    engine.receive(served.snapshot(1, scale=1.02))
    assert generate(engine)["version"].tolist() == [1, 1]
    assert caplog.text == ""


@pytest.mark.parametrize("served", ["llama"], indirect=True)
def test_what_is_not_read_back_any_more_is_an_error(served, monkeypatch):
    served.engine.receive(served.snapshot(0))
    monkeypatch.setattr(sglang_stand_in, "READS_BACK", ())
    with pytest.raises(WeightSyncError, match="'model.embed_tokens.weight'"):
        served.engine.receive(served.snapshot(1))
    assert served.engine.version == -1


@pytest.mark.feature(104)
@pytest.mark.parametrize("served", ["qwen2"], indirect=True)
def test_weights_of_a_model_that_sglang_cannot_read_are_served_and_it_is_logged_once(served, caplog):
    with caplog.at_level(logging.WARNING):
        for version in range(3):
            served.engine.receive(served.snapshot(version, scale=1.0 + version / 50))
    assert (served.engine.version, served.reads()) == (2, 1)
    assert generate(served.engine)["version"].tolist() == [2, 2]
    (said,) = caplog.messages
    assert said.startswith("SGLang cannot read back 26 of this model's 26 tensors")


@pytest.mark.parametrize("served", ["llama whose heads are wider"], indirect=True)
def test_keys_and_values_that_sglang_reads_at_wrong_rows_are_not_compared(served, caplog):
    with caplog.at_level(logging.WARNING):
        served.engine.receive(served.snapshot(0))
    assert served.engine.version == 0
    assert "cannot read back 4 of this model's 20 tensors" in caplog.text
    served.stand_in.deaf = ("model.layers.0.self_attn.q_proj.weight",)
    with pytest.raises(WeightSyncError, match=r"'model\.layers\.0\.self_attn\.q_proj\.weight'$"):
        served.engine.receive(served.snapshot(1, scale=1.02))


@pytest.mark.parametrize(("ranks", "unread"), [(2, 0), (4, 4)])
@pytest.mark.parametrize("served", ["llama"], indirect=True)
def test_ranks_that_share_key_heads_do_not_read_them_back(served, ranks, unread, caplog):
    engine = served.connect(tensor_parallel_size=ranks)
    with caplog.at_level(logging.WARNING):
        engine.receive(served.snapshot(0))
    assert (f"cannot read back {unread} of" in caplog.text) is (unread > 0)
    engine.close()
