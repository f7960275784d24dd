# SPDX-License-Identifier: Apache-2.0
"""The key-value cache of slots against lists of what each sequence has stored."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import OutOfDeviceMemory
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.rollout_torch.fused import SlotCache

LAYERS, ROWS, HEADS, LENGTH, DIM = 2, 4, 3, 9, 2


def entries(generator, *shape):
    return torch.randn(shape, generator=generator)


STEPS = st.lists(st.one_of(st.tuples(st.just("add"), st.integers(1, 5)), st.tuples(st.just("end"), st.integers(0, 3)),
                           st.tuples(st.just("grow"), st.just(0))), max_size=20)  # fmt: skip


@settings(deadline=None)
@given(STEPS)
def test_each_row_reads_what_was_stored_for_it(steps):
    generator = torch.Generator().manual_seed(0)
    cache = SlotCache((LAYERS, 2, ROWS, HEADS, LENGTH, DIM), torch.float32, DeviceMemory(), "rollout")
    rows = []  # each [layers, 2, heads, seq, dim]
    for what, number in steps:
        if what == "add" and len(rows) < ROWS:
            rows.append(entries(generator, LAYERS, 2, HEADS, number, DIM))
            cache.add_row(rows[-1])
        elif what == "end" and number < len(rows):
            kept = [row for row in range(len(rows)) if row != number]
            order = [*kept[:number], *kept[-1:], *kept[number:-1]] if number < len(kept) else kept
            cache.select_rows(order)
            rows = [rows[row] for row in order]
        elif what == "grow" and rows and max(row.shape[3] for row in rows) < LENGTH:
            grow(cache, rows, generator)
        compare(cache, rows)


def grow(cache, rows, generator):
    positions = cache.grow()
    assert positions == [row.shape[3] for row in rows]
    where = cache.indices(torch.tensor(positions))
    fresh = entries(generator, LAYERS, len(rows), 2, HEADS, DIM)
    for layer in range(LAYERS):
        cache.write(layer, where, fresh[layer].flatten(1, 2))
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


def test_rows_that_differ_much_in_length_are_read_apart():
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


def test_the_cache_is_accounted_for_and_its_views_copy_nothing():
    memory = DeviceMemory()
    cache = SlotCache((LAYERS, 2, ROWS, HEADS, LENGTH, DIM), torch.float32, memory, "rollout")
    cache.add_row(torch.zeros(LAYERS, 2, HEADS, 3, DIM))
    cache.add_row(torch.zeros(LAYERS, 2, HEADS, 5, DIM))
    keys, values = cache.read(1, cache.segments(HEADS)[0])
    assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() == cache._data.data_ptr()
    assert memory.bytes_of("rollout") == {"kv_cache": 4 * LAYERS * 2 * ROWS * HEADS * LENGTH * DIM}
    with pytest.raises(OutOfDeviceMemory):
        SlotCache((1, 2, 1, 1, 9, 1), torch.float32, DeviceMemory(capacity=71), "rollout")
