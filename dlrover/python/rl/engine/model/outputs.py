# SPDX-License-Identifier: Apache-2.0
"""Outputs of a model at the action tokens: log-probs and entropy, or scores."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.model import chunked_head
from dlrover.python.rl.engine.model.attention import Documents
from dlrover.python.rl.engine.model.chunked_head import LOWEST, ChunkedHead
from dlrover.python.rl.engine.model.packing import Head, MicroBatch
from dlrover.python.rl.engine.model.ranks import gather_padded, gather_parts

CHUNK_ELEMENTS = 1 << 24
"""Logits that are in float32 at a time."""

CACHED_ELEMENTS = 1 << 18
"""The number on a CPU, chosen for its caches."""


@dataclass(frozen=True, eq=False)
class VocabularyShard:
    """This rank's part of the vocabulary, if ranks divide it (tensor parallel)."""

    start: int  # its first id
    group: Any  # the ranks that divide it


def token_logprobs(
    logits: Any,
    targets: Any,
    temperature: float = 1.0,
    entropy: bool = False,
    shard: VocabularyShard | None = None,
    known_ids: int | None = None,
) -> tuple[Any, Any]:
    """Compute log-probs of tokens under ``softmax(logits / temperature)``, and that distribution's entropy.

    Both are computed in float32 (float64 for float64 logits) in chunks, with exact gradients. Temperature 0 means
    greedy decoding, for which log-probs are computed at temperature 1.

    Args:
        logits: ``[tokens, vocab]``, or this rank's columns of it.
        targets: int64 ``[tokens]`` or ``[tokens, n]``: ids in the whole vocabulary.
        shard: this rank's columns; the other ranks have to call too.
        known_ids: ids from this one on have probability 0 and log-prob minus infinity; None: no limit.

    Returns:
        Log-probs in the shape of ``targets``, and entropies ``[tokens]`` in nats, or None.
    """
    table = targets[:, None] if targets.ndim == 1 else targets
    columns = _count_columns(logits, shard, known_ids)
    logprobs, entropies = _TokenLogprobs.apply(logits, table, temperature or 1.0, entropy, shard, columns)
    if known_ids is not None:
        logprobs = logprobs.masked_fill(table >= known_ids, -torch.inf)
    return logprobs.view_as(targets), entropies if entropy else None


def _count_columns(logits: Any, shard: VocabularyShard | None, known_ids: int | None) -> int:
    """Count this rank's columns of known ids, which come first."""
    width = int(logits.shape[1])
    return width if known_ids is None else min(width, max(0, known_ids - (shard.start if shard else 0)))


class _TokenLogprobs(torch.autograd.Function):
    """Log-probs and entropy: for ``c = (l - max l) / T``, ``Z = sum exp c`` and ``p = exp(c) / Z`` they are
    ``log p_t = c_t - log Z`` and ``H = log Z - sum p c``, with ``T d(log p_t) / dl = 1_t - p`` and
    ``T dH / dl = -p (c - log Z + H)``."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes no keywords
        ctx: Any, logits: Any, targets: Any, temperature: float, entropy: bool, shard: Any, columns: int
    ) -> tuple[Any, Any]:
        every, logits = logits, _select_columns(logits, columns)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        places = targets - (shard.start if shard else 0)
        mine = (places >= 0) & (places < logits.shape[1])
        places = places.clamp(0, logits.shape[1] - 1)
        most = logits.amax(dim=1).to(wide)
        if shard is not None:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=shard.group)
        # Sums over the vocabulary: of exp(c), of exp(c) c, and of c at each target.
        sums = logits.new_zeros((2 + targets.shape[1], len(logits)), dtype=wide)
        if is_compiled := chunked_head.applies_to(logits):
            sums[0], sums[1] = chunked_head.compiled(chunked_head.sums)(logits.detach(), most, temperature)
            centred = (logits.gather(1, places).to(wide) - most[:, None]) / temperature
            sums[2:] = torch.where(mine, centred, 0.0).t()
        for rows in [] if is_compiled else _chunks(logits):
            centred = logits[rows].to(wide) - most[rows, None]
            if temperature != 1.0:
                centred.div_(temperature)
            sums[2:, rows] = torch.where(mine[rows], centred.gather(1, places[rows]), 0.0).t()
            weights = centred.exp() if entropy else centred.exp_()
            sums[0, rows] = weights.sum(dim=1)
            if entropy:
                sums[1, rows] = weights.mul_(centred.clamp_(min=LOWEST)).sum(dim=1)
        if shard is not None:
            dist.all_reduce(sums, group=shard.group)
        log_total = sums[0].log()
        entropies = log_total - sums[1] / sums[0]
        ctx.save_for_backward(every, places, mine, most, log_total, entropies)
        ctx.temperature, ctx.columns = temperature, columns
        ctx.set_materialize_grads(False)  # an entropy that is only measured costs nothing here
        return (sums[2:] - log_total).t().contiguous(), entropies

    @staticmethod
    def backward(ctx: Any, by_logprob: Any, by_entropy: Any) -> tuple[Any, ...]:
        every, places, mine, most, log_total, entropies = ctx.saved_tensors
        logits = _select_columns(every, ctx.columns)
        if by_logprob is None:
            by_logprob = torch.zeros_like(mine, dtype=log_total.dtype)
        by_target = torch.where(mine, by_logprob, 0.0)
        if places.shape[1] == 1 and chunked_head.applies_to(logits):
            saved = every.detach(), most.detach(), log_total.detach(), places, by_target, by_logprob
            compute = chunked_head.compiled(chunked_head.gradient)
            gradient = compute(*saved, ctx.temperature, entropies.detach(), by_entropy)
            gradient[:, ctx.columns :] = 0.0
            return gradient, *[None] * 5
        gradient = torch.empty_like(every)
        gradient[:, ctx.columns :] = 0.0
        for rows in _chunks(logits):
            part = logits[rows].to(most.dtype) - most[rows, None]
            if ctx.temperature != 1.0:
                part.div_(ctx.temperature)
            part.sub_(log_total[rows, None])
            slope = by_logprob[rows].sum(dim=1, keepdim=True)
            if by_entropy is not None:
                slope = part.clamp(min=LOWEST).add_(entropies[rows, None]).mul_(by_entropy[rows, None]).add_(slope)
            part.exp_().mul_(slope).neg_().scatter_add_(1, places[rows], by_target[rows])
            part = part.div_(ctx.temperature) if ctx.temperature != 1.0 else part
            gradient[rows, : ctx.columns] = part[:, : ctx.columns]
        return gradient, *[None] * 5


def _select_columns(logits: Any, columns: int) -> Any:
    """Return the first ``columns``; if there are none, one of probability 0, for the sums over all ranks."""
    return logits[:, :columns] if columns else logits.new_full((len(logits), 1), -torch.inf)


def _chunks(logits: Any) -> list[slice]:
    rows, width = logits.shape
    size = max(1, min(CHUNK_ELEMENTS, CHUNK_ELEMENTS if logits.is_cuda else CACHED_ELEMENTS) // max(1, width))
    return [slice(start, start + size) for start in range(0, rows, size)]


def top_token_ids(logits: Any, count: int, shard: VocabularyShard | None = None, known_ids: int | None = None) -> Any:
    """Return the most likely ids below ``known_ids`` by logits ``[tokens, vocab]``, or this rank's columns of them:
    int64 ``[tokens, count]``, best first. Raises an ``EngineError`` if the vocabulary has fewer."""
    logits = logits[:, : _count_columns(logits, shard, known_ids)]
    if shard is None:
        if count > logits.shape[1]:
            raise EngineError(f"the {count} most likely ids were requested, but the vocabulary has {logits.shape[1]}")
        return logits.topk(count, dim=1).indices
    values, places = logits.topk(min(count, logits.shape[1]), dim=1)
    missing = count - values.shape[1]
    values = functional.pad(values.float(), (0, missing), value=-torch.inf)
    ids = functional.pad(places + shard.start, (0, missing), value=-1)
    values, ids = (torch.cat(gather_parts(part, shard.group), dim=1) for part in (values, ids))
    best = ids.gather(1, values.topk(count, dim=1).indices)
    if bool((best < 0).any()):
        raise EngineError(f"the {count} most likely ids were requested, but the vocabulary has fewer")
    return best


@dataclass(frozen=True, eq=False)
class OutputReader:
    """Runs a model on micro-batches and picks the outputs at the action tokens."""

    head: Head = "causal"
    device: str = "cpu"
    packs: bool = True  # the model keeps packed documents apart; else each document is a padded row
    fill: int = 0  # the token id of padding
    context: Any = None  # process group that divides the tokens (context parallel)
    shard: VocabularyShard | None = None  # this rank's part of the vocabulary
    chunked: ChunkedHead | None = None  # of a model that packs
    known_ids: int | None = None  # see :func:`token_logprobs`

    def read(self, model: Any, micro: MicroBatch, temperature: float = 1.0, entropy: bool = False) -> tuple[Any, ...]:
        """Return log-probs or scores, float32 ``[actions]``, and entropies or None. With candidates the log-probs are
        ``[actions, 1 + n]``; with ``micro.top`` too, and the ids ``[actions, top]`` come third.

        The vocabulary projection runs only where the next token is an action. In context parallel every rank gets the
        outputs of the whole micro-batch; gradients flow to the rank that computed them."""
        part, counts = self._divide(micro)
        columns = self._score(model, part, temperature, entropy)
        if self.context is None:
            return columns
        return tuple(None if values is None else _join(values, counts, self.context) for values in columns)

    def _score(self, model: Any, part: MicroBatch, temperature: float, entropy: bool) -> tuple[Any, ...]:
        targets = torch.from_numpy(part.target_ids).to(self.device)
        rows = self.chunked.rows_at_a_time(len(part.reads)) if self.chunked is not None and not part.top else None
        if self.chunked is not None and rows is not None:

            def score(logits: Any, targets: Any) -> tuple[Any, Any]:
                return token_logprobs(logits, targets, temperature, entropy, known_ids=self.known_ids)

            with self.chunked.scoring(targets if targets.ndim > 1 else targets[:, None], score, rows):
                logprobs = self._packed(model, part)
                return logprobs if targets.ndim > 1 else logprobs[:, 0], self.chunked.entropies
        if self.packs:
            logits = self._packed(model, part)
        else:
            ids, reads = part.padded(self.fill)
            logits = model(input_ids=torch.from_numpy(ids).to(self.device), use_cache=False).logits
            logits = logits.flatten(0, 1)[torch.from_numpy(reads).to(self.device)]
        if self.head == "token":
            return logits.squeeze(-1).float(), None
        likely: tuple[Any, ...] = ()
        if part.top:
            likely = (top_token_ids(logits, part.top, self.shard, self.known_ids),)
            targets = torch.cat([targets[:, None], *likely], dim=1)
        return *token_logprobs(logits, targets, temperature, entropy, self.shard, self.known_ids), *likely

    def _packed(self, model: Any, part: MicroBatch) -> Any:
        everything = len(part.reads) == len(part.inputs)
        keep = slice(None) if everything else torch.from_numpy(part.reads).to(self.device)
        arguments = {
            "input_ids": torch.from_numpy(part.inputs).to(self.device)[None],
            "position_ids": torch.from_numpy(part.positions).to(self.device)[None],
            "documents": Documents(tuple(part.lengths.tolist()), self.device, self.context),
            "use_cache": False,
        }
        if self.head == "causal":
            return model(**arguments, logits_to_keep=0 if everything else keep).logits[0]
        return model(**arguments).logits[0, keep]

    def _divide(self, micro: MicroBatch) -> tuple[MicroBatch, list[int]]:
        """Return the part of a micro-batch that this rank computes, with the ``lengths`` of the whole, and the number
        of actions that each rank reads."""
        if self.context is None:
            return micro, [len(micro.reads)]
        rank, ranks = dist.get_rank(self.context), dist.get_world_size(self.context)
        size = -(-len(micro.inputs) // ranks)
        spare = size * ranks - len(micro.inputs)  # a separate document at the end, whose outputs are not read
        mine = slice(rank * size, (rank + 1) * size)
        counts = np.bincount(micro.reads // size, minlength=ranks).tolist()
        chosen = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        part = replace(
            micro,
            inputs=np.pad(micro.inputs, (0, spare), constant_values=self.fill)[mine],
            positions=np.concatenate([micro.positions, np.arange(spare)])[mine],
            lengths=np.append(micro.lengths, spare) if spare else micro.lengths,
            reads=micro.reads[chosen] - rank * size,
            targets=micro.targets[chosen],
            candidates=None if micro.candidates is None else micro.candidates[chosen],
        )
        return part, counts


def _join(outputs: Any, counts: list[int], group: Any) -> Any:
    """Gather the outputs of all ranks. All compute the same with them, so only the own part needs a gradient."""
    most = max(counts)
    if not most:  # an empty micro-batch, which keeps a replica in step with the others
        return outputs
    everyone = gather_padded(outputs.detach(), most, group).split(most)
    parts = [part[:count] for part, count in zip(everyone, counts, strict=True)]
    parts[dist.get_rank(group)] = outputs
    return torch.cat(parts)
