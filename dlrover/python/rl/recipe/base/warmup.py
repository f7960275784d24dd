# SPDX-License-Identifier: Apache-2.0
"""Warm-up of standby processes: use a tiny model as in a run, so that imports and first-use costs, which take seconds,
are over. It uses no disk and no accelerator, and preserves the random state."""

import gc
from typing import Any

import numpy as np
import torch
from transformers import Qwen2ForCausalLM

from dlrover.python.rl.algorithm.base import EngineLoss
from dlrover.python.rl.algorithm.registry import make_algorithm
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.state_tree import dump, load
from dlrover.python.rl.engine.api.base import OptimizerConfig, SamplingParams
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.loading import TensorSource, as_causal_lm
from dlrover.python.rl.engine.model.ranks import get_random_state, preserve_random_state, seed_random, set_random_state
from dlrover.python.rl.engine.model.spec import ModelSpec
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer, tiny_config
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from dlrover.python.rl.engine.weight_sync.transports import TRANSPORTS

TRANSPORTS.load("auto")

_SHAPE = {"hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 16}
_SHAPE |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def warm_actor() -> None:
    with preserve_random_state():
        engine = Fsdp2TrainEngine(_throwaway_spec(), OptimizerConfig(lr=1e-3))
        engine.step(_make_batch(), EngineLoss(make_algorithm("grpo")))
        engine.publish()
        state = dump({"engine": engine.state_dict(), "random": get_random_state()})
        restored = load(state.skeleton, state.buffers)
        engine.load_state_dict(restored["engine"])
        set_random_state(restored["random"])
        seed_random(0)
        del engine, state, restored
    gc.collect()


def warm_reference() -> None:
    with preserve_random_state():
        Fsdp2TrainEngine(_throwaway_spec(), None).evaluate(_make_batch())
    gc.collect()


def warm_rollout() -> None:
    with preserve_random_state():
        weights, spec = Fsdp2TrainEngine(_throwaway_spec(), None).publish(), _throwaway_spec()
        model: Any = Qwen2ForCausalLM.from_pretrained(  # like a model for rollouts, but without files
            None,
            config=spec.config,
            state_dict=Qwen2ForCausalLM(spec.config).state_dict(),
            dtype=torch.float32,
            attn_implementation="sdpa",
        )
        engine = TorchRolloutEngine(as_causal_lm(model, spec.tokenizer))
        engine.receive(weights)
        tokens = [np.array(engine.tokenizer.encode(text), dtype=np.int64) for text in ("1+1=", "12+3=")]
        prompts = Batch({"prompt_id": np.arange(2), "tokens": Ragged.from_rows(tokens, dtype=np.int64)})
        completions = engine.generate(prompts, SamplingParams(3, 1.0, 2), (0,))
        del weights, engine, completions
    gc.collect()


def _throwaway_spec() -> ModelSpec:
    tokenizer = make_byte_tokenizer()
    config = tiny_config(tokenizer, **_SHAPE)
    weights = TensorSource(Qwen2ForCausalLM(config).state_dict())
    return ModelSpec("throwaway", None, config, tokenizer, weights=weights)


def _make_batch() -> Batch:
    rows = [np.arange(4), np.arange(6)]
    tokens = Ragged.from_rows(rows, dtype=np.int64)
    return Batch(
        {
            "tokens": tokens,
            "action_mask": Ragged.from_rows([row >= 2 for row in rows], dtype=np.bool_),
            "old_logprobs": tokens.like(np.full(10, -1.0, dtype=np.float32)),
            "advantage": np.array([1.0, -1.0], dtype=np.float32),
            "weight": np.array([0.1, 0.1], dtype=np.float32),
        }
    )
