# SPDX-License-Identifier: Apache-2.0
"""Decoding of the PyTorch rollout engine: the rows of requests, the cache, recorded steps and steps ahead."""

import random
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import OutOfDeviceMemory
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import Request, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout_torch import decoder
from dlrover.python.rl.engine.rollout_torch.batch import ADMIT_SHARE, Scheduler
from dlrover.python.rl.engine.rollout_torch.decoder import ROW_GROUP, StepGraphs, rounded_length, rounded_rows
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from dlrover.python.rl.engine.rollout_torch.fused import SlotCache
from tests.support.rollout_cases import TEXTS, drain, prompts, snapshot


def full_scheduler(rows, requests):
    scheduler = Scheduler(rows)
    scheduler.add(range(requests))
    assert scheduler.admit() == list(range(min(rows, requests)))
    return scheduler


def test_many_free_rows_are_taken_together():
    scheduler = full_scheduler(4 * ADMIT_SHARE, 4 * ADMIT_SHARE + 5)
    scheduler.remove({0, 1, 2})
    assert scheduler.admit() == []
    scheduler.remove({3})
    assert scheduler.admit() == [64, 65, 66, 67]
    scheduler.remove({4})
    assert scheduler.admit() == [68], "no other request waits"


def test_hole_in_the_last_group_is_filled_by_the_last_row():
    scheduler = full_scheduler(6, 6)
    assert scheduler.remove({1, 4}) == scheduler.active == [0, 5, 2, 3]


def test_hole_in_a_group_is_filled_by_the_oldest_of_the_next():
    order = full_scheduler(3 * ROW_GROUP, 3 * ROW_GROUP).remove({3})
    moved = {3: ROW_GROUP, ROW_GROUP: 2 * ROW_GROUP, 2 * ROW_GROUP: 3 * ROW_GROUP - 1}
    assert order == [moved.get(row, row) for row in range(3 * ROW_GROUP - 1)]


def test_groups_stay_in_the_order_of_age():
    scheduler, number, generator = Scheduler(4 * ROW_GROUP), 0, random.Random(0)
    for _ in range(300):
        scheduler.add(range(number, number + 3))
        number += 3
        scheduler.admit()
        scheduler.remove(generator.sample(scheduler.active, min(2, len(scheduler.active))))
        groups = [scheduler.active[start : start + ROW_GROUP] for start in range(0, len(scheduler.active), ROW_GROUP)]
        assert all(min(newer) >= max(older) - 2 * ROW_GROUP for older, newer in pairwise(groups))


class Cache:
    def __init__(self):
        self.rows = []

    def keep(self, rows):
        for row, old in enumerate(rows):
            self.rows[row] = self.rows[old]
        del self.rows[len(rows) :]


@given(
    st.integers(1, 80), st.lists(st.tuples(st.integers(0, 4), st.sets(st.integers(0, 30)), st.booleans()), max_size=25)
)
def test_cache_holds_the_active_requests_and_loses_none(rows, steps):
    scheduler, cache, running, number = Scheduler(rows), Cache(), set(), 0
    for added, ended, requeued in steps:
        fresh = range(number, number + added)
        number += added
        running.update(fresh)
        scheduler.add(fresh)
        cache.rows += scheduler.admit()
        assert 0 <= min(rows, len(running)) - len(cache.rows) < max(1, rows // ADMIT_SHARE)
        cache.keep(scheduler.remove(ended & running))
        running -= ended
        if requeued:
            scheduler.requeue()
            cache.rows = []
        assert cache.rows == scheduler.active
        assert sorted([*scheduler.active, *scheduler.waiting]) == sorted(running)
        assert list(scheduler.waiting) == sorted(scheduler.waiting)


# -- the key-value cache of slots, against lists of the stored entries ------------------------------------------------
LAYERS, ROWS, HEADS, LENGTH, DIM = 2, 4, 3, 9, 2


STEPS = st.lists(st.one_of(st.tuples(st.just("add"), st.integers(1, 5)), st.tuples(st.just("end"), st.integers(0, 3)),
                           st.tuples(st.just("grow"), st.just(0))), max_size=20)  # fmt: skip


@settings(deadline=None)
@given(STEPS)
def test_row_reads_its_stored_entries(steps):
    generator = torch.Generator().manual_seed(0)
    cache = SlotCache((LAYERS, 2, ROWS, HEADS, LENGTH, DIM), torch.float32, DeviceMemory(), "rollout")
    rows = []  # each [layers, 2, heads, seq, dim]
    for action, number in steps:
        if action == "add" and len(rows) < ROWS:
            rows.append(torch.randn(LAYERS, 2, HEADS, number, DIM, generator=generator))
            cache.add_row(rows[-1])
        elif action == "end" and number < len(rows):
            order = [row for row in range(len(rows)) if row != number]
            order = [*order[:number], *order[-1:], *order[number:-1]] if number < len(order) else order
            cache.select_rows(order)
            rows = [rows[row] for row in order]
        elif action == "grow" and rows and max(row.shape[3] for row in rows) < LENGTH:
            grow(cache, rows, generator)
        compare(cache, rows)


def grow(cache, rows, generator):
    positions = cache.grow()
    assert positions == [row.shape[3] for row in rows]
    indices = cache.indices(torch.tensor(positions))
    fresh = torch.randn(LAYERS, len(rows), 2, HEADS, DIM, generator=generator)
    for layer in range(LAYERS):
        cache.write(layer, indices, fresh[layer].flatten(1, 2))
    for number, row in enumerate(rows):
        rows[number] = torch.cat([row, fresh[:, number, :, :, None]], dim=3)


def compare(cache, rows):
    assert cache.lengths == [row.shape[3] for row in rows]
    if not rows:
        return
    segments = cache.segments(HEADS)
    assert [row for part in segments for row in range(part.start, part.stop)] == list(range(len(rows)))
    for part, layer in product(segments, range(LAYERS)):
        assert part.longest == max(cache.lengths[part.start : part.stop])
        values = cache.flat[layer][part.values].view(-1, part.longest, DIM)
        assert torch.equal(values, cache.read(layer, part)[1])
        assert part.begins.tolist() == [part.longest * bag for bag in range(len(values))]
        for kind, stored in enumerate(cache.read(layer, part)):
            assert stored.shape == ((part.stop - part.start) * HEADS, part.longest, DIM)
            for number, head in product(range(part.start, part.stop), range(HEADS)):
                at = (number - part.start) * HEADS + head
                seen = slice(None) if part.bias is None else part.bias[at, 0] == 0
                assert torch.equal(stored[at][seen], rows[number][layer, kind, head])


def test_rows_of_different_lengths_are_read_apart():
    cache = SlotCache((1, 2, 40, 2, 600, 32), torch.float32, DeviceMemory(), "rollout")
    for length in (*[600] * 16, *[590] * 16, *[100] * 7, 130):
        cache.add_row(torch.zeros(1, 2, 2, length, 32))
    segments = cache.segments(heads=4)
    parts = [(part.start, part.stop, part.longest) for part in segments]
    assert parts == [(0, 32, 600), (32, 40, 130)]
    assert [part.bias.shape for part in segments] == [(64, 1, 600), (16, 1, 130)]
    assert [part.values.shape for part in segments] == [(128 * 600,), (32 * 130,)]
    first, second, third = segments[1].values.view(32, 130)[:3]
    assert torch.equal(first, second) and not torch.equal(second, third), "two queries share a head's values"
    assert (segments[1].bias[0, 0] == 0).tolist() == [True] * 100 + [False] * 30


def test_cache_is_accounted_for_and_read_without_copies():
    memory = DeviceMemory()
    cache = SlotCache((LAYERS, 2, ROWS, HEADS, LENGTH, DIM), torch.float32, memory, "rollout")
    cache.add_row(torch.zeros(LAYERS, 2, HEADS, 3, DIM))
    cache.add_row(torch.zeros(LAYERS, 2, HEADS, 5, DIM))
    keys, values = cache.read(1, cache.segments(HEADS)[0])
    assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() == cache._data.data_ptr()
    assert memory.bytes_of("rollout") == {"kv_cache": 4 * LAYERS * 2 * ROWS * HEADS * LENGTH * DIM}
    with pytest.raises(OutOfDeviceMemory):
        SlotCache((1, 2, 1, 1, 9, 1), torch.float32, DeviceMemory(capacity=71), "rollout")


# -- steps as CUDA graphs: they are recorded, here run as they are, and on a GPU replayed -----------------------------
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs("cuda"))]


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=512)


def engine_with(model_path, device, rows, recorded):
    engine = TorchRolloutEngine(model_path, RolloutSettings(device, max_batch=rows))
    engine._decoder._records = recorded
    return engine


def tokens_of(engine, lengths, new_tokens):
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 256, length) for length in lengths]
    batch = Batch({"prompt_id": np.arange(len(rows)), "tokens": Ragged.from_rows(rows, dtype=np.int64)})
    out = engine.generate(batch, SamplingParams(new_tokens, ignore_eos=True), (0,))
    return [row.tolist() for row in out.ragged("tokens")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("lengths", "rows"), [([5, 40, 17], 8), ([100] * 8, 8), ([3, 90, 200, 4, 150, 6, 7], 3)])
def test_recorded_steps_generate_the_same_tokens(long_model, device, lengths, rows, monkeypatch):
    monkeypatch.setattr(decoder, "_SHORTEST", 64)
    monkeypatch.setattr(decoder, "_FEWEST_ROWS", 2)
    plain = tokens_of(engine_with(long_model, device, rows, False), lengths, 60)
    engine = engine_with(long_model, device, rows, True)
    assert tokens_of(engine, lengths, 60) == plain
    assert len(engine._decoder._graphs._replays) >= 2
    engine.cuda()
    assert len(engine._decoder._graphs._replays) >= 2, "nothing has moved"
    for _ in range(2):  # weights and cache at other addresses
        engine.cpu()
        engine.cuda()
        assert not engine._decoder._graphs._replays
        assert tokens_of(engine, lengths, 60) == plain


@pytest.mark.parametrize("device", DEVICES)
def test_step_is_recorded_once_for_its_rounded_sizes(device):
    seen = []

    def step(inputs, longest):
        seen.append((inputs.shape[1], longest))
        return (inputs[0] + inputs[1])[:, None].float()

    recorded = StepGraphs(step, 100, 300, device)
    for _ in range(3):
        for positions in ([3, 70, 5], [9, 9, 127, 4, 8, 8], [128], [299]):
            expected = [token + position for token, position in enumerate(positions)]
            assert recorded(torch.arange(len(positions)), positions)[:, 0].tolist() == expected
    assert dict.fromkeys(seen) == dict.fromkeys([(8, 128), (8, 256), (8, 300)])


def test_rounding_leaves_few_sizes():
    assert [rounded_rows(rows, 100) for rows in (1, 8, 9, 33, 65, 100)] == [8, 8, 16, 64, 100, 100]
    lengths = {1: 128, 128: 128, 129: 256, 1025: 1152, 1153: 1280, 2049: 2304, 4999: 5000}
    assert {length: rounded_length(length, 5000) for length in lengths} == lengths
    assert len({rounded_length(length, 32768) for length in range(1, 32769)}) == 8 + 5 * 8


# -- an engine that begins the next step before it has the tokens of one -----------------------------------------------
class Counted:
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
        return self.engine.generate(prompts(), SamplingParams(**{"max_new_tokens": 24, **sampling}), (0,))


def request(number):
    tokens = np.frombuffer(TEXTS[number % len(TEXTS)].encode(), dtype=np.uint8).astype(np.int64)
    return Request.fresh(number, 0, tokens)


def by_key(completions):
    return {each.request.key: (each.request.done.tolist(), each.finish) for each in completions}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("forward", ["fused", "huggingface"])
@pytest.mark.parametrize("changes", [{}, {"samples_per_prompt": 3}, {"ignore_eos": True}, {"max_new_tokens": 1}])
def test_steps_ahead_generate_the_same(model_path, device, forward, changes):
    engines = [Counted(model_path, each, forward=forward, device=device) for each in (False, True)]
    plain, ahead = (counted.generate(**changes) for counted in engines)
    for name in ("tokens", "action_mask"):
        assert all(map(np.array_equal, plain.ragged(name), ahead.ragged(name)))
    assert np.allclose(plain.ragged("logprobs").values, ahead.ragged("logprobs").values, atol=1e-5)
    assert plain.objects("completion") == ahead.objects("completion")


def test_end_by_length_costs_no_step(model_path):
    plain, ahead = (Counted(model_path, each) for each in (False, True))
    for counted in (plain, ahead):
        counted.generate(ignore_eos=True, samples_per_prompt=3)
    assert ahead.steps == plain.steps


def test_unforeseen_end_costs_one_token(model_path):
    """One of 16 tokens ends a completion here."""
    plain, ahead = (Counted(model_path, each, rows=8) for each in (False, True))
    for requests in (plain.engine._requests, ahead.engine._requests):
        requests.rules.eos_ids = frozenset(range(0, 256, 16))
    outs = [counted.generate(samples_per_prompt=4) for counted in (plain, ahead)]
    assert all(map(np.array_equal, *(out.ragged("tokens") for out in outs)))
    ended = int(outs[0]["finished"].sum())
    assert ended > 5
    assert sum(plain.steps) < sum(ahead.steps) <= sum(plain.steps) + ended
    assert len(ahead.steps) <= len(plain.steps) + 2, "waiting requests take free rows"


def test_later_and_aborted_requests_are_the_same_ahead(model_path):
    def run(ahead):
        engine, done = Counted(model_path, ahead, rows=3).engine, {}
        engine.add([request(number) for number in range(4)], SamplingParams(max_new_tokens=9), (1,))
        for _ in range(4):
            done |= by_key(engine.advance())
        done |= by_key(engine.abort([(1, 0)]))
        engine.add([request(7)], SamplingParams(max_new_tokens=14, temperature=0.7), (1,))
        for _ in range(3):
            done |= by_key(engine.advance())
        engine.add([request(number) for number in (8, 9)], SamplingParams(max_new_tokens=5), (2,))
        return done | by_key(drain(engine).values())

    plain, ahead = run(False), run(True)
    assert len(plain) == 7 and set(ahead) == set(plain)
    aborted = (1, 0)
    assert ahead.pop(aborted)[0] == plain.pop(aborted)[0]
    assert ahead == plain


@pytest.mark.parametrize("interruption", ["new weights", "host and back", "abort"])
def test_step_ahead_is_dropped_with_its_cache(model_path, interruption):
    def run(ahead):
        engine = Counted(model_path, ahead).engine
        engine.add([request(number) for number in range(3)], SamplingParams(max_new_tokens=12, ignore_eos=True), (1,))
        for _ in range(4):
            engine.advance()
        assert (engine._batch._ahead is not None) == ahead
        if interruption == "new weights":
            engine.receive(snapshot(model_path, 5, scale=1.1))
        elif interruption == "abort":
            requests = [each.request for each in engine.abort()]
            engine.add(requests, SamplingParams(max_new_tokens=12, ignore_eos=True), (1,))
        else:
            engine.cpu()
            engine.cuda()
        assert engine._batch._ahead is None
        done = drain(engine).values()
        return by_key(done), [each.request.versions.tolist() for each in done]

    assert run(True) == run(False)


def test_failed_step_ahead_leaves_the_requests(model_path):
    engine, fresh = (Counted(model_path, ahead).engine for ahead in (True, False))
    step = engine._decoder.step
    for each in (engine, fresh):
        each.add([request(number) for number in range(3)], SamplingParams(max_new_tokens=12, ignore_eos=True), (1,))
    for _ in range(3):
        engine.advance()
    before = {number: list(each.tokens) for number, each in engine._requests.by_number.items()}

    def fail(tokens):
        raise RuntimeError("the device is gone")

    engine._decoder.step = fail
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.advance()
    assert {number: each.tokens for number, each in engine._requests.by_number.items()} == before
    engine._decoder.step = step
    assert by_key(drain(engine).values()) == by_key(drain(fresh).values())
