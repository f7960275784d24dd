"""A rollout engine on plain PyTorch: a decoding loop over the Hugging Face model and its key-value cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.base import SamplingParams
from dlrover.python.rl.engine.torch.loading import CausalLM, load_causal_lm
from dlrover.python.rl.engine.torch.sampling import choose, uniforms
from dlrover.python.rl.engine.weights import WeightSnapshot

KEEP_SHARE = 0.75
"""Finished rows leave the batch once at most this share of it still decodes: moving the cache costs about a step."""

Ids = npt.NDArray[np.int64]


class TorchRolloutEngine:
    """Implements :class:`~dlrover.python.rl.engine.base.RolloutEngine`.

    A completion depends on the weights, its prompt and its own seed. What it is batched with changes its logits only by
    the rounding of float32 matrix products (about 1e-6), which decides a token only at a tie of that size.

    Args:
        model: folder or hub name of a causal language model, or one that is loaded, which becomes the engine's own.
        device: a torch device.
        max_batch: most sequences decoded at a time.

    Raises:
        EngineError: there is no such model, or it names no end-of-sequence token.
    """

    def __init__(self, model: str | Path | CausalLM, *, device: str = "cpu", max_batch: int = 64) -> None:
        self.version = -1
        self._lm = model if isinstance(model, CausalLM) else load_causal_lm(model, device)
        if not self._lm.eos_ids:
            raise EngineError(f"'{model}' names no end-of-sequence token: its completions would never finish")
        self._lm.model.requires_grad_(False)
        self._device, self._max_batch = device, max_batch

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._lm.tokenizer

    def receive(self, weights: WeightSnapshot, rewind: bool = False) -> None:
        """Take over new weights in place; all of them are verified before any is used.

        Args:
            weights: what arrived.
            rewind: take over older ones too.

        Raises:
            WeightSyncError: the weights do not fit, are corrupt or older; the old ones keep serving.
        """
        self._lm.check(weights, serving=-1 if rewind else self.version)
        self.version = -1  # Holds if writing breaks off: a mixture has no version, and is not served.
        self._lm.write(weights)
        self.version = weights.version

    @torch.no_grad()
    def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        """Complete each prompt ``samples_per_prompt`` times; see the port for the columns.

        Raises:
            EngineError: a prompt is empty, holds unknown ids or leaves no room for ``max_new_tokens``; nothing has been
                generated then. Or the weights give logits that are not numbers.
        """
        tokens, ids = prompts.ragged("tokens"), prompts.dense("prompt_id").astype(np.int64)
        self.check(tokens, sampling)
        samples = sampling.samples_per_prompt
        prompt_of, sample_of = np.repeat(np.arange(len(ids)), samples), np.tile(np.arange(samples), len(ids))
        completions: list[_Completion | None] = [None] * len(prompt_of)
        # Prompts of similar length decode together, which keeps the padding small.
        order = np.argsort(np.repeat(tokens.lengths, samples), kind="stable")
        for start in range(0, len(order), self._max_batch):
            chosen = order[start : start + self._max_batch]
            draws = [uniforms(seed, ids[prompt_of[at]], sample_of[at], sampling.max_new_tokens) for at in chosen]
            decoding = _Decoding(self._lm, self._device, sampling, np.stack(draws))
            for at, completion in zip(chosen, decoding.run(tokens, prompt_of[chosen]), strict=True):
                completions[at] = completion
        done = [completion for completion in completions if completion is not None]
        return _assemble(tokens, prompt_of, done).with_columns(
            prompt_id=ids[prompt_of],
            sample_index=sample_of.astype(np.int64),
            version=np.full(len(prompt_of), self.version, dtype=np.int64),
        )

    def check(self, tokens: Ragged, sampling: SamplingParams) -> None:
        """Refuse prompts that :meth:`generate` would refuse.

        Raises:
            EngineError: one is empty, holds unknown ids or leaves no room for ``max_new_tokens``.
        """
        empty = np.flatnonzero(tokens.lengths == 0)
        if len(empty):
            raise EngineError(f"prompts {empty.tolist()} are empty: generation needs at least one token to begin with")
        self._lm.check_tokens(tokens.values, int(tokens.lengths.max(initial=0)) + sampling.max_new_tokens)


@dataclass(frozen=True, eq=False)
class _Completion:
    tokens: Ids
    logprobs: npt.NDArray[np.float32]
    finished: bool


class _Decoding:
    """One batch of sequences, decoded token by token until each has ended.

    State of the rows still in the batch: ``rows`` (which of the sequences they are), the cache, the attention ``mask``
    ``[rows, seen]`` and the ``position`` ``[rows, 1]`` of the token to feed next.
    """

    def __init__(self, lm: CausalLM, device: str, sampling: SamplingParams, draws: npt.NDArray[np.float64]) -> None:
        self._lm, self._device, self._sampling = lm, device, sampling
        self._draws = torch.from_numpy(draws).to(device)
        self._ends = torch.tensor(lm.eos_ids, device=device)
        shape = (len(draws), sampling.max_new_tokens)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(shape, dtype=torch.float64, device=device)
        self._lengths = torch.zeros(len(draws), dtype=torch.int64, device=device)
        self._finished = torch.zeros(len(draws), dtype=torch.bool, device=device)
        self._rows = torch.arange(len(draws), device=device)
        self._cache = DynamicCache(config=lm.model.config)

    def run(self, prompts: Ragged, prompt_of: Ids) -> Iterator[_Completion]:
        """Complete ``prompts[prompt_of[i]]`` for each sequence ``i``; yields them in order."""
        logits = self._prefill(prompts, prompt_of)
        for step in range(self._sampling.max_new_tokens):
            tokens = self._record(step, logits)
            alive = ~self._finished[self._rows]
            count = int(alive.sum())
            if not count or step + 1 == self._sampling.max_new_tokens:
                break
            if count <= KEEP_SHARE * len(self._rows):
                tokens = tokens[self._drop(alive)]
            logits = self._forward(tokens)
        if not self._logprobs.isfinite().all():
            raise EngineError("the model's logits are not numbers: its weights are broken")
        return self._completions()

    def _prefill(self, prompts: Ragged, prompt_of: Ids) -> Any:
        """Run each prompt once, padded on the left, then give each of its samples a copy of the cache."""
        unique, copies = np.unique(prompt_of, return_inverse=True)
        width = int(prompts.lengths[unique].max())
        ids = np.full((len(unique), width), self._lm.pad_id, dtype=np.int64)
        mask = np.zeros((len(unique), width), dtype=np.int64)
        for row, prompt in enumerate(unique):
            length = len(prompts[prompt])
            ids[row, width - length :] = prompts[prompt]
            mask[row, width - length :] = 1
        self._mask = torch.from_numpy(mask).to(self._device)
        positions = (self._mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = self._call(torch.from_numpy(ids).to(self._device), positions)
        index = torch.from_numpy(copies).to(self._device)
        self._cache.batch_select_indices(index)
        self._mask, self._position = self._mask[index], positions[index, -1:] + 1
        return logits[index]

    def _forward(self, tokens: Any) -> Any:
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        logits = self._call(tokens[:, None], self._position)
        self._position = self._position + 1
        return logits

    def _call(self, ids: Any, positions: Any) -> Any:
        """Logits of the last position: ``[rows, vocab]``."""
        return self._lm.model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _record(self, step: int, logits: Any) -> Any:
        """Draw each row's next token and note it for the rows that have not ended; returns ``[rows]``."""
        rows = self._rows
        tokens, logprobs = choose(logits, self._sampling.temperature, self._draws[rows, step])
        alive = ~self._finished[rows]
        writing = rows[alive]
        self._tokens[writing, step] = tokens[alive]
        self._logprobs[writing, step] = logprobs[alive]
        self._lengths[writing] = step + 1
        self._finished[writing] = torch.isin(tokens[alive], self._ends)
        return tokens

    def _drop(self, alive: Any) -> Any:
        """Remove the rows that have ended; returns the indices of the others."""
        kept = alive.nonzero().squeeze(1)
        self._cache.batch_select_indices(kept)
        self._rows, self._mask, self._position = self._rows[kept], self._mask[kept], self._position[kept]
        return kept

    def _completions(self) -> Iterator[_Completion]:
        tokens, logprobs = self._tokens.cpu().numpy(), self._logprobs.float().cpu().numpy()
        for row, length in enumerate(self._lengths.tolist()):
            yield _Completion(tokens[row, :length], logprobs[row, :length], bool(self._finished[row]))


def _assemble(prompts: Ragged, prompt_of: Ids, completions: list[_Completion]) -> Batch:
    heads = [prompts[prompt] for prompt in prompt_of]
    pairs = list(zip(heads, completions, strict=True))
    zeros = [np.zeros(len(head), dtype=np.float32) for head in heads]
    tokens = Ragged.from_rows([np.concatenate([head, done.tokens]) for head, done in pairs], dtype=np.int64)
    chosen = [np.arange(len(head) + len(done.tokens)) >= len(head) for head, done in pairs]
    logprobs = [np.concatenate([zero, done.logprobs]) for zero, done in zip(zeros, completions, strict=True)]
    return Batch(
        {
            "tokens": tokens,
            "action_mask": Ragged.from_rows(chosen, dtype=np.bool_),
            "logprobs": Ragged.from_rows(logprobs, dtype=np.float32),
            "finished": np.array([done.finished for done in completions], dtype=np.bool_),
        }
    )
