"""What engines import and build on their first use, done ahead in a process that waits to take over from another.

Most of it is the same for every model: the libraries' own imports and tables, which take seconds. A model of a few
hundred parameters is built, used as a run would use it, and thrown away. Nothing is written to disk, no accelerator is
touched, and the random generators are as before.
"""

import gc
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from dlrover.python.rl.algorithm.base import EngineLoss
from dlrover.python.rl.algorithm.registry import make_algorithm
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.state_tree import dump, load
from dlrover.python.rl.engine.base import OptimizerConfig, SamplingParams
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.torch.blueprint import Blueprint
from dlrover.python.rl.engine.torch.loading import CausalLM, as_causal_lm
from dlrover.python.rl.engine.torch.randomness import random_state, random_state_kept, seed_random, set_random_state
from dlrover.python.rl.engine.torch.rollout import TorchRolloutEngine
from dlrover.python.rl.engine.torch.sources import TensorSource
from dlrover.python.rl.recipe.tiny import byte_tokenizer


def warm_actor() -> None:
    """An update, a commit, and going back to it."""
    with random_state_kept():
        engine = Fsdp2TrainEngine(_blueprint(), OptimizerConfig(lr=1e-3))
        engine.step(_drawn(), EngineLoss(make_algorithm("grpo")))
        engine.publish()
        state = dump({"engine": engine.state_dict(), "random": random_state()})
        back = load(state.skeleton, state.buffers)
        engine.load_state_dict(back["engine"])
        set_random_state(back["random"])
        seed_random(0)
        del engine, state, back
    gc.collect()


def warm_reference() -> None:
    """Log-probs of a few tokens."""
    with random_state_kept():
        Fsdp2TrainEngine(_blueprint(), None).evaluate(_drawn())
    gc.collect()


def warm_rollout() -> None:
    """Taking over weights, and two completions."""
    with random_state_kept():
        weights = Fsdp2TrainEngine(_blueprint(), None).publish()
        engine = TorchRolloutEngine(_throwaway_lm())
        engine.receive(weights)
        drawn = engine.generate(_prompts(engine.tokenizer), SamplingParams(3, 1.0, 2), (0,))
        del weights, engine, drawn
    gc.collect()


def _throwaway_lm() -> CausalLM:
    """Goes the way of a model that is loaded for rollouts, but for the files."""
    tokenizer = byte_tokenizer()
    config = _config(tokenizer)
    weights = Qwen2ForCausalLM(config).state_dict()
    model: Any = Qwen2ForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32, attn_implementation="sdpa"
    )
    return as_causal_lm(model, tokenizer)


def _blueprint() -> Blueprint:
    """The same for training."""
    tokenizer = byte_tokenizer()
    config = _config(tokenizer)
    weights = TensorSource(Qwen2ForCausalLM(config).state_dict())
    return Blueprint("throwaway", None, config, tokenizer, weights=weights)


def _config(tokenizer: Any) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _prompts(tokenizer: Any) -> Batch:
    tokens = [np.array(tokenizer.encode(text), dtype=np.int64) for text in ("1+1=", "12+3=")]
    return Batch({"prompt_id": np.arange(2), "tokens": Ragged.from_rows(tokens, dtype=np.int64)})


def _drawn() -> Batch:
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
