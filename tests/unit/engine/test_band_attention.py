# SPDX-License-Identifier: Apache-2.0
"""Attention a band of queries at a time: values and gradients against the plain formula."""

import pytest
import torch

from dlrover.python.rl.engine import cpu_kernels as bands
from dlrover.python.rl.engine.cpu_kernels import band_attention, can_use_band_attention
from dlrover.python.rl.engine.model.attention import Documents, attend


def plain(query, key, value, scaling):
    """The formula, differentiated by autograd."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (scaling * query @ key.transpose(2, 3)).masked_fill(later, -torch.inf).softmax(-1) @ value


def problem(documents, kv_heads, length):
    generator = torch.Generator().manual_seed(length)
    shapes = [(documents, heads, length, 8) for heads in (4, kv_heads, kv_heads, 4)]
    *inputs, outer = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [tensor.requires_grad_() for tensor in inputs], outer


@pytest.mark.parametrize(("documents", "kv_heads", "length"), [(1, 4, 1), (1, 2, 5), (3, 2, 7), (2, 1, 12)])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_values_and_gradients_are_those_of_the_formula(documents, kv_heads, length, scaling, monkeypatch):
    monkeypatch.setattr(bands, "BAND", 5)
    inputs, outer = problem(documents, kv_heads, length)
    found = band_attention(*inputs, scaling)
    expected = plain(*inputs, scaling or 8**-0.5)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    pairs = zip(torch.autograd.grad(found, inputs, outer), torch.autograd.grad(expected, inputs, outer), strict=True)
    assert all(torch.allclose(own, plainly, rtol=0, atol=1e-12) for own, plainly in pairs)


@pytest.mark.feature(54)
def test_packed_documents_of_such_lengths_attend_to_themselves_alone(monkeypatch):
    monkeypatch.setattr(bands, "LENGTHS", range(4, 9))
    monkeypatch.setattr(bands, "BAND", 3)
    generator = torch.Generator().manual_seed(0)
    lengths = (9, 7, 7, 4, 2)
    query, key, value = (torch.randn(1, heads, sum(lengths), 8, generator=generator) for heads in (4, 2, 2))
    found = attend(query, key, value, Documents(lengths))
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    expected = torch.cat([plain(*part, 8**-0.5) for part in parts], dim=2).transpose(1, 2)
    assert torch.allclose(found, expected, atol=1e-6)


def test_only_documents_that_gain_by_it_on_a_host():
    assert can_use_band_attention(torch.empty(1, 256, 8))
    assert not can_use_band_attention(torch.empty(1, 64, 8))
    assert not can_use_band_attention(torch.empty(1, 4096, 8))
    assert not can_use_band_attention(torch.empty(1, 256, 8, dtype=torch.bfloat16))
    assert not can_use_band_attention(torch.empty(1, 256, 8, device="meta"))
