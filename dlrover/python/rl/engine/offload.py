"""The port by which an engine's memory is given to another one and taken back."""

from typing import Literal, Protocol, TypeAlias

Place: TypeAlias = Literal["cpu", "cuda", "meta"]
"""Where an engine's tensors are: on the host, on its device (which on a machine without one is the host, accounted for
as if it were a device), or nowhere."""

Part: TypeAlias = Literal["all", "weights", "kv_cache"]
"""What :meth:`Offloadable.cuda` brings back."""


class Offloadable(Protocol):
    """An engine whose memory can be given to another one and taken back.

    Weights, optimizer state, gradients and key-value cache all move; what later calls give does not depend on it.
    A call that needs what is not there is refused with an :class:`EngineError` that says which call brings it back.
    """

    def cpu(self) -> None:
        """Move everything to host memory and free the device's; a key-value cache is dropped."""
        ...

    def cuda(self, part: Part = "all") -> None:
        """Bring ``part`` to the device. A train engine has no key-value cache and refuses that part.

        Raises:
            OutOfDeviceMemory: it does not fit; names who holds what.
        """
        ...

    def meta(self) -> None:
        """Release all tensors on host and device: none stays alive. Only new weights bring the engine back."""
        ...

    def place(self) -> Place:
        """Where the weights are."""
        ...

    def footprint(self) -> dict[str, int]:
        """Bytes on the device by kind: ``weights``, ``gradients``, ``optimizer``, ``kv_cache``; 0s left out."""
        ...
