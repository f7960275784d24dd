"""What the engines that come along can do: asked before a job starts, and by the engines themselves.

An engine that a user has registered is not known here: it says itself what it cannot do, when it is made.
"""

from dataclasses import asdict, dataclass

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.layout import ParallelSizes
from dlrover.python.rl.engine.optimizing import OptimizerConfig


@dataclass(frozen=True)
class TrainAbilities:
    """What a train engine can do.

    Attributes:
        divides: the fields of :class:`~dlrover.python.rl.engine.layout.ParallelSizes` that it may have above 1.
        adapters: whether it trains adapters.
        shares_process: whether an engine of one rank runs in a process that is a rank of another engine already.
        tells_likely_ids: whether it evaluates with ``top``, as teachers of whole distributions do.
        sgd: whether it has that optimizer besides AdamW.
        bare_head: whether it trains a token head without a bias, as reward models have.
    """

    divides: tuple[str, ...] = ()
    adapters: bool = False
    shares_process: bool = False
    tells_likely_ids: bool = False
    sgd: bool = False
    bare_head: bool = True


_TRAIN = {
    "fsdp2": TrainAbilities(("ddp_size", "tensor_parallel_size", "context_parallel_size"), True, True, True, sgd=True),
    "deepspeed": TrainAbilities(tells_likely_ids=True),
    "megatron": TrainAbilities(("tensor_parallel_size", "pipeline_parallel_size"), bare_head=False),
}
_ON_ONE_DEVICE = ("torch",)
"""Rollout engines that cannot split a model."""


def train_faults(engine: str, sizes: ParallelSizes, lora: bool, bare_head: bool = False) -> list[str]:
    """What is asked of a train engine that it cannot do.

    Args:
        engine: its name.
        sizes: how its ranks shall divide the model.
        lora: whether it shall train adapters.
        bare_head: whether its token head shall have no bias.
    """
    if (can := _TRAIN.get(engine)) is None:
        return []
    above = {name: size for name, size in asdict(sizes).items() if size > 1 and name not in can.divides}
    faults = [f"{name} is {size}, but {engine} runs with 1 only here" for name, size in above.items()]
    if bare_head and not can.bare_head:
        faults.append(f"{engine} gives a score head a bias, which a reward model must not have: use fsdp2 or deepspeed")
    if lora and not can.adapters:
        faults.append(f"{engine} trains whole models only here: adapters need fsdp2")
    elif lora and sizes.tensor_parallel_size > 1:
        faults.append(
            f"adapters cannot be split: tensor_parallel_size is {sizes.tensor_parallel_size}, and has to be 1"
        )
    return faults


def optimizer_faults(engine: str, config: OptimizerConfig) -> list[str]:
    """What is asked of a train engine's optimizer that it cannot do."""
    if config.name == "adamw" or _TRAIN.get(engine, TrainAbilities(sgd=True)).sgd:
        return []
    return [f"{engine} runs with adamw only here: {config.name} needs fsdp2"]


def rollout_faults(engine: str, tensor_parallel_size: int) -> list[str]:
    """What is asked of a rollout engine that it cannot do."""
    if engine in _ON_ONE_DEVICE and tensor_parallel_size > 1:
        return [f"tensor_parallel_size is {tensor_parallel_size}, but the {engine} rollout engine runs on one device"]
    return []


def shares_process(engine: str) -> bool:
    """Whether a train engine of one rank runs in a process that is a rank of another one; of a user's own: unknown, so
    yes."""
    return _TRAIN.get(engine, TrainAbilities(shares_process=True)).shares_process


def tells_likely_ids(engine: str) -> bool:
    """Whether a train engine evaluates with ``top``; of a user's own: unknown, so yes."""
    return _TRAIN.get(engine, TrainAbilities(tells_likely_ids=True)).tells_likely_ids


def refuse(faults: list[str]) -> None:
    """Raise EngineError if there are any."""
    if faults:
        raise EngineError("; ".join(faults))
