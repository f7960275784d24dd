# SPDX-License-Identifier: Apache-2.0
"""Ranks as a grid."""

import pytest

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.settings import Layout, ParallelSizes


def test_what_is_left_over_shards_the_parameters():
    layout = Layout.of(16, ParallelSizes(ddp_size=2, tensor_parallel_size=2))
    assert layout == Layout(ddp=2, shard=4, tensor=2)
    assert (layout.world_size, layout.data_parallel_size) == (16, 8)


@pytest.mark.feature(51)
def test_a_product_that_does_not_divide_the_ranks_is_refused_with_the_numbers():
    with pytest.raises(EngineError, match="6 ranks cannot be divided by ddp_size 2 x tensor_parallel_size 2 = 4"):
        Layout.of(6, ParallelSizes(ddp_size=2, tensor_parallel_size=2))


def test_consecutive_ranks_form_a_replica_and_every_rank_has_a_place_of_its_own():
    sizes = ParallelSizes(ddp_size=2, tensor_parallel_size=2, context_parallel_size=3, pipeline_parallel_size=2)
    layout = Layout.of(48, sizes)
    places = [layout.coordinates(rank) for rank in range(48)]
    assert len({place.shape for place in places}) == 48
    replicas = [(place.ddp, place.shard) for place in places]
    assert replicas == sorted(replicas)
    assert places[1] == Layout(0, 0, 0, 0, 1)
    assert [replicas.count(replica) for replica in set(replicas)] == [sizes.replica_size] * 4
