# SPDX-License-Identifier: Apache-2.0
"""Any module from the meta device: sources, names, buffers, and what is refused."""

import pytest
import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.base import Rendezvous
from dlrover.python.rl.engine.api.settings import Layout, ParallelSizes
from dlrover.python.rl.engine.fsdp2.materialize import MaterializeOptions, materialize
from dlrover.python.rl.engine.fsdp2.shards import Grid
from dlrover.python.rl.engine.model.loading import TensorSource
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.model.spec import empty_weights
from tests.support.processes import run

ALONE = Grid(Layout(), Layout(1, 0, 0, 0, 0))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Perceptron(torch.nn.Module):
    """No Hugging Face model: two layers, a tie, a saved buffer and one that is computed."""

    non_split_modules = (Block,)

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.first = torch.nn.Linear(6, 5, bias=False)
        self.last = torch.nn.Linear(6, 5, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("mean", torch.full((6,), 2.0))
        self.register_buffer("scale", torch.arange(6.0), persistent=False)

    def forward(self, x):
        for block in self.blocks:
            x = block((x - self.mean) * self.scale)
        return self.last(x)


def tensors():
    torch.manual_seed(0)
    state = Perceptron().state_dict()
    del state["last.weight"]
    return {**state, "mean": torch.full((6,), 3.0)}


def empty():
    with empty_weights():
        return Perceptron()


def plain():
    module = Perceptron()
    module.load_state_dict({**tensors(), "last.weight": tensors()["first.weight"]})
    return module


INPUT = torch.linspace(-1, 1, 24).reshape(4, 6)


@pytest.mark.feature(36, 42)
def test_any_module_from_tensors_or_functions():
    sources = [tensors(), {name: (lambda tensor=tensor: tensor) for name, tensor in tensors().items()}]
    for source in sources:
        made = materialize(empty(), TensorSource(source), ALONE, MaterializeOptions())
        assert made.module.last.weight is made.module.first.weight
        assert torch.equal(made.module(INPUT), plain()(INPUT))
        assert list(made.buffers) == ["mean"]


@pytest.mark.feature(37)
def test_names_can_be_changed_and_a_missing_one_is_named():
    renamed = {f"policy.{name}": tensor for name, tensor in tensors().items()}
    made = materialize(empty(), TensorSource(renamed), ALONE, MaterializeOptions(rename="policy.{}".format))
    assert torch.equal(made.module(INPUT), plain()(INPUT))
    del renamed["policy.blocks.1.linear.bias"]
    with pytest.raises(EngineError, match=r"the checkpoint lacks blocks\.1\.linear\.bias"):
        materialize(empty(), TensorSource(renamed), ALONE, MaterializeOptions(rename="policy.{}".format))


def test_a_tensor_of_another_shape_is_named_with_both():
    wrong = tensors() | {"first.weight": torch.zeros(5, 7)}
    with pytest.raises(EngineError, match=r"first\.weight of shape \(5, 6\) \(it has \(5, 7\)\)"):
        materialize(empty(), TensorSource(wrong), ALONE, MaterializeOptions())


def test_a_buffer_without_value_is_named():
    with torch.device("meta"):
        module = Perceptron()
    with pytest.raises(EngineError, match="buffers without values: mean, scale"):
        materialize(module, TensorSource(tensors()), ALONE, MaterializeOptions())


def test_parameters_in_empty_weights_have_no_memory_and_buffers_have():
    module = empty()
    assert all(parameter.is_meta for parameter in module.parameters())
    assert module.scale.tolist() == [0, 1, 2, 3, 4, 5]
    assert not torch.nn.Linear(2, 2).weight.is_meta


def sharded(rank, world_size, port):
    ranks = Ranks.connect(Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240))
    grid = Grid.of(ranks, ParallelSizes())
    made = materialize(empty(), TensorSource(tensors()), grid, MaterializeOptions())
    output = made.module(INPUT)
    output.square().sum().backward()
    made.shards.take_gradients()
    whole = {shard.name: shard.whole(shard.master.grad, grid).numpy() for shard in made.shards}
    ranks.close()
    return output.detach().numpy(), whole


@pytest.mark.slow
@pytest.mark.feature(42)
def test_a_module_of_ones_own_is_sharded():
    module = plain()
    output = module(INPUT)
    output.square().sum().backward()
    for found, gradients in run(2, sharded):
        assert torch.allclose(torch.from_numpy(found), output, atol=1e-6)
        for name, parameter in module.named_parameters():
            # Both ranks had the same rows: their gradients add up.
            assert torch.allclose(torch.from_numpy(gradients[name]), 2 * parameter.grad, rtol=1e-5), name
