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


def plain(temperature):
    """Values and gradient by the formulas, differentiated by autograd."""
    logits, targets, weights = problem()
    table = torch.log_softmax(logits / temperature, dim=-1)
    logprobs = table[torch.arange(TOKENS), targets]
    entropies = -(table.exp() * table).sum(dim=-1)
    (weights[0] @ logprobs + weights[1] @ entropies).backward()
    return logprobs.detach(), entropies.detach(), logits.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 3 * VOCAB, 1 << 24])
def test_values_and_gradients_are_those_of_the_formulas(temperature, chunk, monkeypatch):
    monkeypatch.setattr(outputs, "CHUNK_ELEMENTS", chunk)
    logits, targets, weights = problem()
    logprobs, entropies = token_logprobs(logits, targets, temperature, entropy=True)
    (weights[0] @ logprobs + weights[1] @ entropies).backward()
    for found, expected in zip((logprobs, entropies, logits.grad), plain(temperature), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_an_entropy_that_is_only_measured_changes_no_gradient():
    gradients = []
    for entropy in (False, True):
        logits, targets, weights = problem()
        logprobs, entropies = token_logprobs(logits, targets, 0.7, entropy=entropy)
        assert entropy == (entropies is not None)
        (weights[0] @ logprobs).backward()
        gradients.append(logits.grad)
    assert torch.equal(*gradients)
    assert torch.allclose(entropies, plain(0.7)[1], rtol=0, atol=1e-12)
    (weights[1] @ token_logprobs(logits, targets, 0.7, entropy=True)[1]).backward()  # without the log-probs


def outcome(logits, temperature, trains):
    """Log-probs, entropies and a gradient, where one logit is minus infinity."""
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
def test_what_is_compiled_for_gpus_gives_the_same(device, temperature, trains, monkeypatch):
    """On a CPU what was traced runs as it is written."""
    logits = problem()[0].detach()
    expected = outcome(logits.clone(), temperature, trains)
    if device == "cpu":
        monkeypatch.setattr(chunked_head, "applies_to", lambda logits: True)
        traced = functools.cache(functools.partial(torch.compile, dynamic=True, backend="eager"))
        monkeypatch.setattr(chunked_head, "compiled", traced)
    for found, plain_one in zip(outcome(logits.to(device, torch.float32), temperature, trains), expected, strict=True):
        assert torch.allclose(found, plain_one, rtol=0, atol=1e-5)


def many():
    """Three ids for each token, one of them twice, and weights for their log-probs."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (TOKENS, 3), generator=generator)
    ids[:, 2] = ids[:, 0]
    return ids, torch.randn(TOKENS, 3, generator=generator, dtype=torch.float64)


def plain_many(temperature):
    """Log-probs, entropies and gradient by the formulas."""
    (logits, _, weights), (ids, slopes) = problem(), many()
    table = torch.log_softmax(logits / temperature, dim=-1)
    found, entropies = table.gather(1, ids), -(table.exp() * table).sum(dim=-1)
    ((slopes * found).sum() + weights[1] @ entropies).backward()
    return found.detach(), entropies.detach(), logits.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [3 * VOCAB, 1 << 24])
def test_several_ids_at_each_token(temperature, chunk, monkeypatch):
    monkeypatch.setattr(outputs, "CHUNK_ELEMENTS", chunk)
    (logits, _, weights), (ids, slopes) = problem(), many()
    logprobs, entropies = token_logprobs(logits, ids, temperature, entropy=True)
    ((slopes * logprobs).sum() + weights[1] @ entropies).backward()
    for found, expected in zip((logprobs, entropies, logits.grad), plain_many(temperature), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_the_likeliest_ids_are_in_order():
    logits, _, _ = problem()
    assert torch.equal(top_token_ids(logits, 4), logits.sort(dim=1, descending=True).indices[:, :4])
    with pytest.raises(EngineError, match="12 most likely ids were requested, but the vocabulary has 11"):
        top_token_ids(logits, VOCAB + 1)


def test_without_entropy_the_gradient_is_that_of_the_logprobs():
    logits, targets, weights = problem()
    logprobs, entropies = token_logprobs(logits, targets)
    assert entropies is None
    (weights[0] @ logprobs).backward()
    other, _, _ = problem()
    (weights[0] @ torch.log_softmax(other, -1)[torch.arange(TOKENS), targets]).backward()
    assert torch.allclose(logits.grad, other.grad, rtol=0, atol=1e-12)


def test_logits_of_low_precision_are_summed_in_float32():
    logits, targets, _ = problem()
    low = logits.detach().bfloat16().requires_grad_()
    logprobs, _ = token_logprobs(low, targets)
    assert logprobs.dtype == torch.float32
    wanted = torch.log_softmax(low.detach().double(), -1)[torch.arange(TOKENS), targets]
    assert torch.allclose(logprobs.double(), wanted, atol=1e-6)
    logprobs.sum().backward()
    assert low.grad.dtype == torch.bfloat16


def test_impossible_tokens_do_not_spoil_the_entropy():
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
    table = torch.log_softmax(expected[:, :known_ids] / temperature, dim=-1)
    entropy = -(table.exp() * table).sum(dim=-1)
    (weights[0] @ table[torch.arange(TOKENS), targets] + weights[1] @ entropy).backward()
    tolerance = 1e-5 if compiled else 1e-12
    assert torch.allclose(logprobs, table[torch.arange(TOKENS), targets], rtol=0, atol=tolerance)
    assert torch.allclose(entropies, entropy, rtol=0, atol=tolerance)
    assert torch.allclose(logits.grad, expected.grad, rtol=0, atol=tolerance)
    assert top_token_ids(logits, 4, known_ids=known_ids).max() < (known_ids or VOCAB)


def test_logprob_of_an_unknown_id_is_minus_infinity():
    logits, _, _ = problem()
    logprobs, _ = token_logprobs(logits, torch.tensor([[4, 5, 10]] * TOKENS), known_ids=5)
    assert (logprobs == -torch.inf).tolist() == [[False, True, True]] * TOKENS


def divided_known(rank, world_size, port, known_ids):
    """This rank's columns, of which none may be known."""
    ranks = Ranks.connect(Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240))
    logits, targets, weights = problem()
    columns = slice(0, 4) if rank == 0 else slice(4, VOCAB)
    mine = logits.detach()[:, columns].clone().requires_grad_()
    shard = VocabularyShard(columns.start, dist.group.WORLD)
    logprobs, _ = token_logprobs(mine, targets % known_ids, 0.7, shard=shard, known_ids=known_ids)
    (weights[0] @ logprobs).backward()
    top = top_token_ids(mine.detach(), 3, shard, known_ids)
    ranks.close()
    return logprobs.detach().numpy(), mine.grad.numpy(), top.numpy()


@pytest.mark.parametrize("known_ids", [3, 4, 6])
def test_unknown_ids_of_a_divided_vocabulary_have_none_either(known_ids):
    logits, targets, weights = problem()
    logprobs, _ = token_logprobs(logits, targets % known_ids, 0.7, known_ids=known_ids)
    (weights[0] @ logprobs).backward()
    ranks = run(2, divided_known, known_ids)
    for values, _, top in ranks:
        assert abs(torch.from_numpy(values) - logprobs.detach()).max() < 1e-10
        assert top.tolist() == top_token_ids(logits, 3, known_ids=known_ids).tolist()
    parts = torch.cat([torch.from_numpy(gradient) for _, gradient, _ in ranks], dim=1)
    assert abs(parts - logits.grad).max() < 1e-10


def divided(rank, world_size, port, temperature):
    """This rank's columns, which are not equally many."""
    ranks = Ranks.connect(Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240))
    logits, targets, weights = problem()
    cut = 4
    columns = slice(0, cut) if rank == 0 else slice(cut, VOCAB)
    mine = logits.detach()[:, columns].clone().requires_grad_()
    shard = VocabularyShard(columns.start, dist.group.WORLD)
    logprobs, entropies = token_logprobs(mine, targets, temperature, entropy=True, shard=shard)
    (weights[0] @ logprobs + weights[1] @ entropies).backward()
    found = [tensor.detach().numpy() for tensor in (logprobs, entropies, mine.grad)]
    return [*found, *several_divided(mine.detach(), weights, temperature, shard, ranks)]


def several_divided(columns, weights, temperature, shard, ranks):
    """The same for several ids, and the likeliest ones: more than either rank has columns."""
    mine, (ids, slopes) = columns.clone().requires_grad_(), many()
    logprobs, entropies = token_logprobs(mine, ids, temperature, entropy=True, shard=shard)
    ((slopes * logprobs).sum() + weights[1] @ entropies).backward()
    top = top_token_ids(columns, 9, shard)
    try:
        top_token_ids(columns, VOCAB + 1, shard)
        refused = ""
    except EngineError as error:
        refused = str(error)
    ranks.close()
    return [logprobs.detach().numpy(), mine.grad.numpy(), top.numpy(), refused]


@pytest.mark.slow
@pytest.mark.feature(48, 49)
def test_divided_over_ranks_values_and_gradients_are_the_whole_ones():
    logprobs, entropies, gradient = plain(0.7)
    ranks = run(2, divided, 0.7)
    for found in ranks:
        assert abs(torch.from_numpy(found[0]) - logprobs).max() < 1e-10
        assert abs(torch.from_numpy(found[1]) - entropies).max() < 1e-10
    parts = torch.cat([torch.from_numpy(found[2]) for found in ranks], dim=1)
    assert abs(parts - gradient).max() < 1e-10
    several, _, slope = plain_many(0.7)
    for found in ranks:
        assert abs(torch.from_numpy(found[3]) - several).max() < 1e-10
        assert found[5].tolist() == top_token_ids(problem()[0], 9).tolist()
        assert "the vocabulary has fewer" in found[6]
    parts = torch.cat([torch.from_numpy(found[4]) for found in ranks], dim=1)
    assert abs(parts - slope).max() < 1e-10


def test_replicas_of_which_one_has_nothing_to_read_join_nothing(monkeypatch):
    """Another replica has more micro-batches; ranks that share sequences go through an empty one meanwhile."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    read = torch.zeros(0, requires_grad=True)
    joined = outputs._join(read, [0, 0], "the ranks of a sequence")
    joined.sum().backward()
    assert (len(joined), len(read.grad)) == (0, 0)
