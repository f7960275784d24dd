"""What only this backend can be told."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MegatronOptions:
    """``settings.backend`` of a Megatron engine."""

    cpu_shim: bool = False
    """Run on a machine without CUDA, for tests: calls of megatron-core that name CUDA go to the host."""
