# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropies of tokens: value and gradient against the plain formulas, whole and divided over ranks."""

import functools

import pytest
import torch
import torch.distributed as dist

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.base import Rendezvous
from dlrover.python.rl.engine.model import chunked_head, outputs
from dlrover.python.rl.engine.model.outputs import VocabularyShard, token_logprobs, top_token_ids
from dlrover.python.rl.engine.model.ranks import Ranks
from tests.support.processes import run

TOKENS, VOCAB = 7, 11
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs("cuda"))]


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(TOKENS, VOCAB, generator=generator, dtype=dtype)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    weights = torch.randn(2, TOKENS, generator=generator, dtype=dtype)
    return logits.requires_grad_(), targets, weights


def test_measured_entropy_changes_no_gradient():
    gradients = []
    for entropy in (False, True):
        logits, targets, weights = problem()
        logprobs, entropies = token_logprobs(logits, targets, 0.7, entropy=entropy)
        assert entropy == (entropies is not None)
        (weights[0] @ logprobs).backward()
        gradients.append(logits.grad)
    assert torch.equal(*gradients)
    assert_close([entropies], [formulas(logits, targets, 0.7)[1]])
    (weights[1] @ token_logprobs(logits, targets, 0.7, entropy=True)[1]).backward()  # without the log-probs


def many():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (TOKENS, 3), generator=generator)
    ids[:, 2] = ids[:, 0]
    return ids, torch.randn(TOKENS, 3, generator=generator, dtype=torch.float64)


def formulas(logits, ids, temperature, known_ids=None):
    table = torch.log_softmax(logits[:, :known_ids] / temperature, dim=-1)
    logprobs = table.gather(1, ids.view(TOKENS, -1)).view(ids.shape)
    return logprobs, -(table.exp() * table).sum(dim=-1)


def with_gradient(function, ids, slopes, *arguments, columns=slice(None), **options):
    """Return log-probs and entropies of the problem's logits, or of some columns, and the gradient of a sum of both."""
    logits, _, weights = problem()
    logits = logits.detach()[:, columns].clone().requires_grad_()
    logprobs, entropies = function(logits, ids, *arguments, **options)
    ((slopes * logprobs).sum() + weights[1] @ entropies).backward()
    return [logprobs.detach(), entropies.detach(), logits.grad]


def assert_close(results, expected, tolerance=1e-12):
    for result, wanted in zip(results, expected, strict=True):
        assert torch.allclose(result, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 3 * VOCAB, 1 << 24])
def test_values_and_gradients_match_the_formulas(temperature, chunk, several, monkeypatch):
    monkeypatch.setattr(outputs, "CHUNK_ELEMENTS", chunk)
    _, targets, weights = problem()
    ids, slopes = many() if several else (targets, weights[0])
    results = with_gradient(token_logprobs, ids, slopes, temperature, entropy=True)
    assert_close(results, with_gradient(formulas, ids, slopes, temperature))


def outcome(logits, temperature, trains):
    _, targets, weights = problem()
    with torch.no_grad():
        logits[2, (int(targets[2]) + 1) % VOCAB] = -torch.inf
    logits.requires_grad_()
    outputs = token_logprobs(logits * 1.0, targets.to(logits.device), temperature, entropy=True)
    parts = zip(trains, weights.to(logits), outputs, strict=True)
    sum(weight @ output for is_trained, weight, output in parts if is_trained).backward()
    return [part.detach().cpu().double() for part in (*outputs, logits.grad)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("trains", [(True, False), (True, True), (False, True)])
def test_code_compiled_for_gpus_gives_the_same(device, temperature, trains, monkeypatch):
    """On a CPU what was traced runs as it is written."""
    logits = problem()[0].detach()
    expected = outcome(logits.clone(), temperature, trains)
    if device == "cpu":
        monkeypatch.setattr(chunked_head, "applies_to", lambda logits: True)
        traced = functools.cache(functools.partial(torch.compile, dynamic=True, backend="eager"))
        monkeypatch.setattr(chunked_head, "compiled", traced)
    assert_close(outcome(logits.to(device, torch.float32), temperature, trains), expected, 1e-5)


def test_likeliest_ids_are_in_order():
    logits, _, _ = problem()
    assert torch.equal(top_token_ids(logits, 4), logits.sort(dim=1, descending=True).indices[:, :4])
    with pytest.raises(EngineError, match="12 most likely ids were requested, but the vocabulary has 11"):
        top_token_ids(logits, VOCAB + 1)


def test_logits_of_low_precision_are_summed_in_float32():
    logits, targets, _ = problem()
    low = logits.detach().bfloat16().requires_grad_()
    logprobs, _ = token_logprobs(low, targets)
    assert logprobs.dtype == torch.float32
    wanted = torch.log_softmax(low.detach().double(), -1)[torch.arange(TOKENS), targets]
    assert torch.allclose(logprobs.double(), wanted, atol=1e-6)
    logprobs.sum().backward()
    assert low.grad.dtype == torch.bfloat16


def test_impossible_tokens_leave_a_finite_entropy():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    logprobs, entropies = token_logprobs(logits, torch.tensor([1]), entropy=True)
    (logprobs + entropies).sum().backward()
    assert entropies.item() == pytest.approx(torch.log(torch.tensor(2.0)).item())
    assert logits.grad.isfinite().all()


def test_greedy_is_temperature_one():
    logits, targets, _ = problem()
    assert torch.equal(token_logprobs(logits, targets, 0.0)[0], token_logprobs(logits, targets, 1.0)[0])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("known_ids", [4, VOCAB - 1, VOCAB, VOCAB + 3, None])
def test_unknown_ids_have_no_probability(known_ids, temperature, compiled, monkeypatch):
    if compiled:
        monkeypatch.setattr(chunked_head, "applies_to", lambda logits: True)
        monkeypatch.setattr(chunked_head, "compiled", lambda function: function)
    (logits, targets, weights), (expected, _, _) = problem(), problem()
    targets = targets % min(known_ids or VOCAB, VOCAB)
    with torch.no_grad():
        logits[:, known_ids or VOCAB :] = 300.0  # the likeliest, were they not masked
    logprobs, entropies = token_logprobs(logits, targets, temperature, entropy=True, known_ids=known_ids)
    (weights[0] @ logprobs + weights[1] @ entropies).backward()
    expected_logprobs, expected_entropies = formulas(expected, targets, temperature, known_ids)
    (weights[0] @ expected_logprobs + weights[1] @ expected_entropies).backward()
    results, tolerance = (logprobs, entropies, logits.grad), 1e-5 if compiled else 1e-12
    assert_close(results, (expected_logprobs, expected_entropies, expected.grad), tolerance)
    assert top_token_ids(logits, 4, known_ids=known_ids).max() < (known_ids or VOCAB)


def test_logprob_of_an_unknown_id_is_minus_infinity():
    logits, _, _ = problem()
    logprobs, _ = token_logprobs(logits, torch.tensor([[4, 5, 10]] * TOKENS), known_ids=5)
    assert (logprobs == -torch.inf).tolist() == [[False, True, True]] * TOKENS


def divided(rank, world_size, port, temperature, known_ids=None):
    """Return the results for this rank's columns: of one id, of several, the likeliest ids, and a refusal."""
    ranks = Ranks.connect(Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240))
    columns = slice(0, 4) if rank == 0 else slice(4, VOCAB)  # not equally many; of a rank's none may be known
    shard = VocabularyShard(columns.start, dist.group.WORLD)
    (logits, targets, weights), options = problem(), {"entropy": True, "shard": shard, "known_ids": known_ids}
    cases = [(targets % (known_ids or VOCAB), weights[0])] + ([] if known_ids else [many()])
    results = [with_gradient(token_logprobs, *case, temperature, columns=columns, **options) for case in cases]
    mine = logits.detach()[:, columns]
    top, refusal = top_token_ids(mine, 3 if known_ids else 9, shard, known_ids), ""
    try:
        top_token_ids(mine, VOCAB + 1, shard)
    except EngineError as error:
        refusal = str(error)
    ranks.close()
    return [[tensor.numpy() for tensor in result] for result in results], top.tolist(), refusal


@pytest.mark.feature(48, 49)
@pytest.mark.parametrize("known_ids", [3, 4, 6, pytest.param(None, marks=pytest.mark.slow)])
def test_divided_vocabulary_gives_whole_values_and_gradients(known_ids):
    logits, targets, weights = problem()
    cases = [(targets % (known_ids or VOCAB), weights[0])] + ([] if known_ids else [many()])
    ranks = run(2, divided, 0.7, known_ids)
    for number, case in enumerate(cases):
        whole = with_gradient(token_logprobs, *case, 0.7, entropy=True, known_ids=known_ids)
        parts = [[torch.from_numpy(values) for values in results[number]] for results, _, _ in ranks]
        for part in parts:
            assert_close(part[:2], whole[:2], 1e-10)
        assert_close([torch.cat([part[2] for part in parts], dim=1)], whole[2:], 1e-10)
    for _, top, refusal in ranks:
        assert top == top_token_ids(logits, 3 if known_ids else 9, known_ids=known_ids).tolist()
        assert "the vocabulary has fewer" in refusal


def test_replica_without_rows_joins_nothing(monkeypatch):
    """A replica with fewer micro-batches than another goes through an empty one."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    read = torch.zeros(0, requires_grad=True)
    joined = outputs._join(read, [0, 0], "the ranks of a sequence")
    joined.sum().backward()
    assert (len(joined), len(read.grad)) == (0, 0)
