"""Causal language models in Hugging Face format: read as float32 masters, written whole or not at all."""

import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.weights import WeightSnapshot, verify

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, eq=False)
class CausalLM:
    """A model with what the engines need to know about it.

    Attributes:
        model: the Hugging Face model, float32, dropout off.
        tokenizer: its tokenizer.
        eos_ids: every id that ends a completion: the tokenizer's and those of the generation config.
        pad_id: an id to fill padding with; the model never attends to it.
        vocab_size: rows of the input embedding; ids must be below.
        max_positions: longest sequence in tokens, or None when the model names no limit.
    """

    model: Any
    tokenizer: Any
    eos_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int
    max_positions: int | None

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Name and tensor of every parameter and saved buffer; tied tensors once, under their first name."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def check(self, snapshot: WeightSnapshot, serving: int) -> None:
        """Refuse a snapshot that is not of this model.

        Args:
            snapshot: what arrived.
            serving: the version held now; an older one is refused. -1 takes any.

        Raises:
            WeightSyncError: the snapshot does not fit, is corrupt or older.
        """
        verify(snapshot, {name: tuple(tensor.shape) for name, tensor in self.named_weights()}, serving)

    def check_tokens(self, tokens: Any, longest: int) -> None:
        """Refuse ids outside the vocabulary and sequences of more than ``max_positions`` tokens.

        Args:
            tokens: flat integer array of ids.
            longest: tokens of the longest sequence, those still to be generated included.

        Raises:
            EngineError: either is the case.
        """
        if self.max_positions is not None and longest > self.max_positions:
            raise EngineError(f"a sequence of {longest} tokens does not fit the model's {self.max_positions} positions")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise EngineError(
                f"token ids from {tokens.min()} to {tokens.max()}, but the model knows 0 to {self.vocab_size - 1}"
            )


def load_causal_lm(source: str | Path, device: str = "cpu") -> CausalLM:
    """Load model and tokenizer from a folder or by their name on the hub.

    Weights become float32 whatever the checkpoint holds, since updates of small learning rates vanish in bfloat16.
    Dropout is switched off: a policy's log-probs in training must be those it sampled with.

    Raises:
        EngineError: there is no such model, or the checkpoint lacks weights of it.
    """
    where = _resolve(source)
    hf_logging.disable_progress_bar()  # one bar per process and file drowns the run's own
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            where, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError) as error:
        raise EngineError(f"no model can be loaded from '{source}': {_reason(where)}") from error
    if absent := sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])}):
        # The library would fill them with random numbers and go on.
        raise EngineError(f"the checkpoint '{source}' lacks {', '.join(absent)}")
    return as_causal_lm(model, tokenizer, device)


def as_causal_lm(model: Any, tokenizer: Any, device: str = "cpu") -> CausalLM:
    """A float32 Hugging Face model and its tokenizer, as engines need them; dropout is switched off."""
    disable_dropout(model)
    model.eval().to(device)
    ends = _as_ids(tokenizer.eos_token_id) + _as_ids(getattr(model.generation_config, "eos_token_id", None))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(ends), 0)
    return CausalLM(
        model,
        tokenizer,
        eos_ids=tuple(dict.fromkeys(ends)),
        pad_id=pad,
        vocab_size=model.get_input_embeddings().num_embeddings,
        max_positions=getattr(model.config.get_text_config(), "max_position_embeddings", None),
    )


def is_hub_name(text: str) -> bool:
    """Whether it could be the name of a model on the hub."""
    return _HUB_NAME.fullmatch(text) is not None


def _resolve(source: str | Path) -> str:
    text = str(Path(source).expanduser()) if str(source).startswith("~") else str(source)
    if not Path(text).is_dir() and (isinstance(source, Path) or not is_hub_name(text)):
        raise EngineError(f"no model at '{text}': it is neither a folder nor reachable on the hub")
    return text


def _reason(where: str) -> str:
    if Path(where).is_dir():
        return "the folder does not hold a causal language model with its tokenizer"
    return "it is neither a folder nor reachable on the hub"


def _as_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def disable_dropout(model: Any) -> None:
    """A policy's log-probs in training must be those it sampled with."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout") and isinstance(module.attention_dropout, float):
            module.attention_dropout = 0.0


def prepare(module: Any, trained: bool, recomputing: bool, reentrant: bool = False) -> None:
    """Freeze a module that is not trained; let a trained one recompute activations in its backward pass, if asked.

    Args:
        module: whose dropout is off: recomputing puts it in training mode, since Transformers recomputes in no other.
        trained: whether it is.
        recomputing: whether a trained one trades time for memory.
        reentrant: whether autograd is entered anew for each part that is recomputed.
    """
    if not trained:
        module.requires_grad_(False)
    elif recomputing:
        module.train()
        enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
        enable({"use_reentrant": reentrant})


def write_atomically(path: Path, model: Any, tokenizer: Any, tensors: Mapping[str, Any] | None = None) -> Path:
    """Write model and tokenizer to the folder ``path``; a reader sees the old folder or the new one, never a part.

    The weights are ``tensors``, by name, or the model's own. Between the two folders there is an instant with neither:
    one that is not empty cannot be replaced in one step.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (path.with_name(f".{path.name}.{kind}-{uuid.uuid4().hex}") for kind in ("new", "old"))
    try:
        model.save_pretrained(fresh, state_dict=tensors)
        if tokenizer is not None:
            tokenizer.save_pretrained(fresh)
        for file in fresh.iterdir():
            flush(file)
        if path.exists():
            path.rename(old)
        fresh.rename(path)
        flush(path.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return path


def flush(path: Path) -> None:
    """Push a file's or folder's contents to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
