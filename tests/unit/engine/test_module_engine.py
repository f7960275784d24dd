# SPDX-License-Identifier: Apache-2.0
"""A user's module over several ranks has the gradients, steps and weights of one process in every layout."""

import pickle
import zlib
from pathlib import Path

import cloudpickle
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from dlrover.python.rl.engine.api.base import Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.model.train_module import CallShare, empty_weights
from dlrover.python.rl.engine.module.engine import ModuleEngine
from dlrover.python.rl.engine.module.parallel import compute_gradient_weight
from dlrover.python.rl.session.split import NeedParallel, split_arguments
from tests.support.processes import held_ports, run
from tests.support.session_toys import EvenLong, Long, Policy, Summing, TwoLayers, start

ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).tolist()
TEXTS = [[72, 101, 108, 108, 111], [49, 50, 43, 49, 51, 61, 50], [1, 2, 3, 4], [9, 8, 7]]
WORLD = 4
TIMEOUT_S = 280.0
LAYOUTS = {"shards": {}, "copies": {"ddp_size": 4}, "both": {"ddp_size": 2}}
TENSOR_LAYOUTS = {
    "tensor-shards": {"tensor_parallel_size": 2},
    "tensor-copies": {"tensor_parallel_size": 2, "ddp_size": 2},
}
SEQUENCE_LAYOUTS = {
    "pairs": {"context_parallel_size": 2},
    "all-together": {"context_parallel_size": 4},
    "pairs-of-matrices": {"context_parallel_size": 2, "tensor_parallel_size": 2},
}
KINDS = (TwoLayers, Summing)
LONG = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(1)).tolist()

# Even parts, uneven ones, fewer rows than ranks, and several passes that add up: rows and what divides the loss.
CALLS = [[(ROWS, 1)], [(ROWS[:7], 1)], [(ROWS[:3], 1)], [(ROWS[:1], 1)], [(ROWS[:4], 2), (ROWS[4:7], 2)]]


def drawn(name, shape):
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.ones(shape) if "norm" in name else torch.randn(shape, generator=draw) * 0.06


class Rank:
    """One rank of an engine, called as the session calls it."""

    def __init__(self, rank, port, sizes, module):
        self.parallel = ParallelSizes(**sizes)
        self.at = rank // self.parallel.tensor_parallel_size
        self.sizes = WORLD // self.parallel.replica_size, self.parallel.context_parallel_size
        settings = TrainSettings(parallel=self.parallel)
        self.engine = ModuleEngine(f"T[{rank}]", module, settings, Rendezvous(rank, WORLD, "127.0.0.1", port, 600.0))

    def call(self, method, *args):
        values, _, shares, split = split_arguments(args, {}, *self.sizes, method)
        part = [value.value[self.at] if at in split else value.value for at, value in enumerate(values)]
        return self.engine.call(method, shares[self.at], part, {})


def gradients(mine):
    """Read ``.grad``, whole, after each group of calls, and last after a call whose rows are not divided."""
    results = []
    for group in CALLS:
        for rows, divide_by in group:
            mine.call("train_step", NeedParallel(rows, pad=True), divide_by)
        results.append(mine.call("gradients_now"))
        mine.engine._made.module.zero_grad()
    mine.call("train_step", ROWS)
    return [*results, mine.call("gradients_now")]


def trained(mine, folder):
    for texts in (TEXTS, TEXTS[:3]):
        mine.call("train_step", NeedParallel(texts, pad=True))
        mine.call("optimizer_step")
    mine.engine.cpu()
    published = mine.engine.publish()  # from host memory
    mine.engine.cuda()
    mine.engine.save(Path(folder))
    weights = {name: published.tensor(name).clone() for name in published.buffers} if published else None
    return weights, mine.call("logprobs", TEXTS), mine.engine.footprint(), mine.engine.version


def learned_from(mine, type):
    """Loss and whole gradients of one pass over rows that are divided by their sequences, or are not."""
    ids, labels = ([row[at : at + 8] for row in LONG] for at in (0, 1))
    loss = mine.call("train_step", NeedParallel(ids, type=type), NeedParallel(labels, type=type), 4 * 8)
    gradient = mine.call("gradients_now")
    mine.engine._made.module.zero_grad()
    return loss, gradient


def sequences(rank, ports, long_models):
    results = {}
    for layout, sizes in SEQUENCE_LAYOUTS.items():
        for kind, module in long_models.items():
            mine = Rank(rank, next(ports), sizes, module)
            results[layout, kind] = {type: learned_from(mine, type) for type in ("seq", "dp")}
            mine.engine.close()
    return results


def everything(rank, _world, port, ports, modules, language_models, long_models, folder):
    """All layouts, one after the other in the same processes: starting these takes longest."""
    results, ports = {}, iter([port, *ports])
    for layout, sizes in LAYOUTS.items():
        for kind, module in modules.items():
            mine = Rank(rank, next(ports), sizes, module)
            results[layout, kind] = gradients(mine)
            mine.engine.close()
    for layout, sizes in {**LAYOUTS, **TENSOR_LAYOUTS}.items():
        for vocabulary, module in language_models.items():
            mine = Rank(rank, next(ports), sizes, module)
            results[layout, vocabulary] = trained(mine, f"{folder}/{layout}-{vocabulary}")
            mine.engine.close()
    results |= sequences(rank, ports, long_models)
    return pickle.dumps(results)  # Tensors would travel by handles of processes that have ended.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=128)


@pytest.fixture(scope="module")
def ranks(model, saved):
    modules = {}
    for kind in KINDS:
        with empty_weights():
            modules[kind.__name__] = cloudpickle.dumps(kind())
    language_models = {name: cloudpickle.dumps(module) for name, module in language_modules(model).items()}
    long_models = {cls.__name__: cloudpickle.dumps(cls.from_pretrained(model)) for cls in (Long, EvenLong)}
    with held_ports(30) as ports:
        results = run(WORLD, everything, ports, modules, language_models, long_models, str(saved), timeout_s=TIMEOUT_S)
    return [pickle.loads(result) for result in results]


def plain_gradient(group, kind):
    """Compute the gradient of the mean (or sum) over each call's rows in one process."""
    module = kind()
    module.load_state_dict(start())
    module.eval()
    for rows, divide_by in group:
        squares = module(torch.tensor(rows)).square()
        ((squares.sum() if kind is Summing else squares.mean()) / divide_by).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def close(one, other):
    return torch.allclose(one, other, atol=1e-6)


@pytest.mark.feature(29)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("number", range(len(CALLS) + 1))
def test_ranks_have_the_gradient_of_all_rows(ranks, layout, kind, number):
    """Rows of the last call are not divided, and count once."""
    expected = plain_gradient([*CALLS, [(ROWS, 1)]][number], kind)
    for rank in ranks:
        gradient = rank[layout, kind.__name__][number]
        assert gradient.keys() == expected.keys()
        assert [name for name in expected if not close(gradient[name], expected[name])] == []


@pytest.mark.parametrize(
    ("share", "sizes", "mean", "total"),
    [
        (CallShare(rows=2, of=7), {"replicas": 4}, 2 / 7, 1.0),
        (CallShare(rows=0, of=3), {"replicas": 4}, 0.0, 0.0),
        (CallShare(rows=3, of=3), {"replicas": 4}, 1.0, 1.0),
        (CallShare(rows=0, of=0), {"replicas": 4}, 0.25, 0.25),
        (CallShare(rows=2, of=4, sequences=True), {"replicas": 2, "context": 3}, 1 / 6, 1.0),
        (CallShare(rows=2, of=4, sequences=False), {"replicas": 2, "context": 3}, 1 / 6, 1 / 3),
    ],
)
def test_a_gradient_is_weighted_by_its_rows(share, sizes, mean, total):
    assert compute_gradient_weight("mean", share, **sizes) == pytest.approx(mean)
    assert compute_gradient_weight("sum", share, **sizes) == pytest.approx(total)


# -- sequences --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def unsplit(model):
    plain = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = torch.tensor(LONG)
    logits = plain(input_ids=rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in plain.named_parameters()}


@pytest.mark.feature(31)
@pytest.mark.slow
@pytest.mark.parametrize("layout", SEQUENCE_LAYOUTS)
@pytest.mark.parametrize("kind", ["Long", "EvenLong"])
@pytest.mark.parametrize("type", ["seq", "dp"])
def test_divided_sequences_have_the_loss_and_gradient_of_whole(ranks, unsplit, layout, kind, type):
    loss, expected = unsplit
    context, tensor = (SEQUENCE_LAYOUTS[layout].get(f"{name}_parallel_size", 1) for name in ("context", "tensor"))
    alike = tensor if type == "seq" else tensor * context  # ranks that have computed the same
    parts = [rank[layout, kind][type][0] for rank in ranks[::alike]]
    assert (sum(parts) if kind == "Long" else sum(parts) / len(parts)) == pytest.approx(loss, abs=1e-5)
    for rank in ranks:
        gradients = rank[layout, kind][type][1]
        assert gradients.keys() == expected.keys()
        far = {name: float((gradients[name] - one).abs().max()) for name, one in expected.items()}
        assert {name: size for name, size in far.items() if size > 1e-5} == {}


# -- a language model -------------------------------------------------------------------------------------------------
def language_modules(model):
    """One with a vocabulary that two cannot share, so that each has all of it; and one with a vocabulary they can."""
    return {"odd": OneByOne.from_pretrained(model), "even": Drawn.from_pretrained(model, vocab_size=260)}


@pytest.fixture(scope="module")
def expected(model):
    """The weights after two steps of a plain loop; a row's loss is the mean over its tokens, and rows count alike."""
    odd = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32)
    even = Qwen2ForCausalLM(Drawn.from_pretrained(model, vocab_size=260).config)
    for name, tensor in even.named_parameters():
        tensor.data = drawn(name, tuple(tensor.shape))
    weights = {}
    for vocabulary, plain in {"odd": odd, "even": even}.items():
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for texts in (TEXTS, TEXTS[:3]):
            (sum(row_loss(plain, row) for row in texts) / len(texts)).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights[vocabulary] = {name: tensor.detach() for name, tensor in plain.named_parameters()}
    return weights


def row_loss(module, row):
    tokens = torch.tensor([row])
    return torch.nn.functional.cross_entropy(module(input_ids=tokens).logits[0, :-1], tokens[0, 1:])


@pytest.mark.feature(44, 47)
@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["odd", "even"])
@pytest.mark.parametrize("layout", [*LAYOUTS, *TENSOR_LAYOUTS])
def test_a_language_model_trains_alike_in_every_layout(ranks, expected, saved, layout, vocabulary):
    weights, logprobs, _, versions = zip(*(rank[layout, vocabulary] for rank in ranks), strict=True)
    plain = expected[vocabulary]
    assert weights[1:] == (None,) * (WORLD - 1)
    assert weights[0].keys() == plain.keys()
    far = {name: float((weights[0][name] - tensor).abs().max()) for name, tensor in plain.items()}
    # Of two steps of 1e-2 each; where a gradient is nearly 0, AdamW makes its rounding as large as others.
    assert {name: size for name, size in far.items() if size > 4e-4} == {}
    assert versions == (2,) * WORLD
    assert all(torch.allclose(torch.tensor(one[0]), torch.tensor(logprobs[0][0]), atol=1e-5) for one in logprobs)
    loaded = AutoModelForCausalLM.from_pretrained(saved / f"{layout}-{vocabulary}", dtype=torch.float32)
    assert [name for name, tensor in loaded.named_parameters() if not torch.equal(tensor, weights[0][name])] == []


@pytest.mark.feature(44)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "parts"), [("shards", 4), ("copies", 1), ("both", 2), ("tensor-shards", 4), ("tensor-copies", 2)]
)
def test_each_rank_holds_its_part_of_weights_and_optimizer(ranks, expected, layout, parts):
    whole = 3 * 4 * sum(tensor.numel() for tensor in expected["even"].values())  # weights and two moments
    for rank in ranks:
        nbytes = sum(rank[layout, "even"][2].values())
        assert whole / parts * 0.9 < nbytes < whole / parts * 1.15


class OneByOne(Policy):
    def train_step(self, rows, grad_acc_steps=1):
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, padding_value=-100)
        logits = self(input_ids=padded.clamp(min=0)).logits
        logits.div_(1.0)  # in place, as policies do with their temperature
        logits = logits[:, :-1].transpose(1, 2)
        losses = torch.nn.functional.cross_entropy(logits, padded[:, 1:], reduction="none").sum(dim=1)
        loss = (losses / (padded[:, 1:] >= 0).sum(dim=1)).mean()
        loss.backward()
        return loss.item()


class Drawn(OneByOne):
    def materialization_source(self):
        return drawn
