"""What a checkpoint of a model and its optimizer holds: float32 masters, moments and saved buffers by name."""

from typing import Any

from dlrover.python.rl.engine.fsdp2.materialize import Materialized
from dlrover.python.rl.engine.fsdp2.shards import ParameterShard
from dlrover.python.rl.engine.torch.checkpoint import model_tensor, optimizer_tensor
from dlrover.python.rl.engine.torch.optimizer import MasterOptimizer


def checkpoint_tensors(made: Materialized, optimizer: MasterOptimizer[ParameterShard] | None) -> dict[str, Any]:
    """The live tensors by name, in a form that says which part of the whole each is."""
    tree = {model_tensor(shard.name): shard.as_dtensor(shard.master.detach()) for shard in made.shards}
    tree |= {model_tensor(name): buffer for name, buffer in made.buffers.items()}
    for shard, state in optimizer.state() if optimizer else ():
        for kind, tensor in state.items():
            tree[optimizer_tensor(shard.name, kind)] = shard.as_dtensor(tensor) if tensor.ndim else tensor
    return tree
