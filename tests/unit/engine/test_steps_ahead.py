# SPDX-License-Identifier: Apache-2.0
"""A rollout engine that begins the next step before it has the tokens of one gives what it gives without that."""

import numpy as np
import pytest
import torch

from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import Request, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.weights import take_snapshot
from dlrover.python.rl.engine.model.spec import load_causal_lm
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine

needs_cuda = pytest.mark.needs("cuda")
TEXTS = ["a", "what is the answer to this?", "37+45=", "a longer prompt than all of the others, by far", "xyz"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=128)


class Counted:
    """An engine whose decoder counts its steps and the sequences of each."""

    def __init__(self, model_path, ahead, rows=4, forward="fused", device="cpu"):
        settings = RolloutSettings(device, max_batch=rows, backend={"forward": forward})
        self.engine = TorchRolloutEngine(model_path, settings)
        self.engine._batch._runs_ahead = ahead
        self.steps, step = [], self.engine._decoder.step

        def counted(tokens):
            self.steps.append(len(tokens))
            return step(tokens)

        self.engine._decoder.step = counted

    def generate(self, **sampling):
        rows = [list(text.encode()) for text in TEXTS]
        prompts = Batch({"prompt_id": np.arange(len(rows)), "tokens": Ragged.from_rows(rows, dtype=np.int64)})
        return self.engine.generate(prompts, SamplingParams(**{"max_new_tokens": 24, **sampling}), (0,))


def request(number):
    tokens = np.frombuffer(TEXTS[number % len(TEXTS)].encode(), dtype=np.uint8).astype(np.int64)
    return Request.fresh(number, 0, tokens)


def by_key(completions):
    return {each.request.key: (each.request.done.tolist(), each.finish) for each in completions}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("forward", ["fused", "huggingface"])
@pytest.mark.parametrize("changes", [{}, {"samples_per_prompt": 3}, {"ignore_eos": True}, {"max_new_tokens": 1}])
def test_all_tokens_are_the_same(model_path, device, forward, changes):
    engines = [Counted(model_path, each, forward=forward, device=device) for each in (False, True)]
    plain, ahead = (counted.generate(**changes) for counted in engines)
    for name in ("tokens", "action_mask"):
        assert all(map(np.array_equal, plain.ragged(name), ahead.ragged(name)))
    assert np.allclose(plain.ragged("logprobs").values, ahead.ragged("logprobs").values, atol=1e-5)
    assert plain.objects("completion") == ahead.objects("completion")


def test_requests_that_end_by_their_length_cost_no_step(model_path):
    plain, ahead = (Counted(model_path, each) for each in (False, True))
    for counted in (plain, ahead):
        counted.generate(ignore_eos=True, samples_per_prompt=3)
    assert ahead.steps == plain.steps


def test_an_end_that_could_not_be_foreseen_costs_one_token(model_path):
    """One of 16 tokens ends a completion here, so they end at steps of their own."""
    plain, ahead = (Counted(model_path, each, rows=8) for each in (False, True))
    for requests in (plain.engine._requests, ahead.engine._requests):
        requests.rules.eos_ids = frozenset(range(0, 256, 16))
    outs = [counted.generate(samples_per_prompt=4) for counted in (plain, ahead)]
    assert all(map(np.array_equal, *(out.ragged("tokens") for out in outs)))
    ended = int(outs[0]["finished"].sum())
    assert ended > 5
    assert sum(plain.steps) < sum(ahead.steps) <= sum(plain.steps) + ended
    assert len(ahead.steps) <= len(plain.steps) + 2, "rows that are free are taken by those that wait"


def test_requests_that_come_go_and_have_other_settings(model_path):
    def run(ahead):
        counted, found = Counted(model_path, ahead, rows=3), {}
        engine = counted.engine
        engine.add([request(number) for number in range(4)], SamplingParams(max_new_tokens=9), (1,))
        for _ in range(4):
            found |= by_key(engine.advance())
        found |= by_key(engine.abort([(1, 0)]))
        engine.add([request(7)], SamplingParams(max_new_tokens=14, temperature=0.7), (1,))
        for _ in range(3):
            found |= by_key(engine.advance())
        engine.add([request(number) for number in (8, 9)], SamplingParams(max_new_tokens=5), (2,))
        while engine.running:
            found |= by_key(engine.advance())
        return found

    plain, ahead = run(False), run(True)
    assert len(plain) == 7 and set(ahead) == set(plain)
    aborted = (1, 0)
    assert ahead.pop(aborted)[0] == plain.pop(aborted)[0]
    assert ahead == plain


def test_without_a_request_left_no_step_is_begun_ahead(model_path):
    counted = Counted(model_path, True)
    engine = counted.engine
    engine.add([request(number) for number in range(3)], SamplingParams(max_new_tokens=12, ignore_eos=True), (1,))
    for _ in range(3):
        engine.advance()
    assert len(engine.abort()) == 3 and engine._batch._ahead is None
    assert len(counted.generate(ignore_eos=True)) == len(TEXTS)


@pytest.mark.parametrize("interruption", ["new weights", "host and back"])
def test_a_step_begun_ahead_is_dropped_with_its_cache(model_path, interruption):
    def run(ahead):
        engine = Counted(model_path, ahead).engine
        named = load_causal_lm(model_path).named_weights()
        newer = take_snapshot(((name, 1.1 * tensor) for name, tensor in named), 5)
        engine.add([request(number) for number in range(3)], SamplingParams(max_new_tokens=12, ignore_eos=True), (1,))
        for _ in range(4):
            engine.advance()
        assert (engine._batch._ahead is not None) == ahead
        if interruption == "new weights":
            engine.receive(newer)
        else:
            engine.cpu()
            engine.cuda()
        assert engine._batch._ahead is None
        completions = []
        while engine.running:
            completions += engine.advance()
        return by_key(completions), [each.request.versions.tolist() for each in completions]

    assert run(True) == run(False)


def test_an_error_leaves_all_requests_as_they_were(model_path):
    counted = Counted(model_path, True)
    engine, step = counted.engine, counted.engine._decoder.step
    engine.add([request(number) for number in range(3)], SamplingParams(max_new_tokens=12, ignore_eos=True), (1,))
    for _ in range(3):
        engine.advance()
    before = {number: list(each.tokens) for number, each in engine._requests.by_number.items()}

    def fail(tokens):
        raise RuntimeError("the device is gone")

    engine._decoder.step = fail
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.advance()
    assert {number: each.tokens for number, each in engine._requests.by_number.items()} == before
    engine._decoder.step, completions = step, []
    while engine.running:
        completions += engine.advance()
    fresh = Counted(model_path, False).engine
    fresh.add([request(number) for number in range(3)], SamplingParams(max_new_tokens=12, ignore_eos=True), (1,))
    expected = []
    while fresh.running:
        expected += fresh.advance()
    assert by_key(completions) == by_key(expected)
