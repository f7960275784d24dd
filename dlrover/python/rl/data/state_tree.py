# SPDX-License-Identifier: Apache-2.0
"""A tree of plain values as a JSON skeleton and flat buffers, and back: the same values and types, without pickle.

A tree is made of dict and OrderedDict (keys: str, int, bool, None and tuples of these), list, tuple, str, int, float,
bool, None, bytes, numpy arrays and scalars, and torch tensors. Numbers and texts go into the skeleton; arrays, tensors
and bytes into buffers. Lost are strides (arrays return C-contiguous), aliasing, a tensor's device and ``requires_grad``
(tensors return on the CPU), and attributes of an OrderedDict."""

import json
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.common.errors import ConfigError, DataError

MAX_DEPTH = 100  # levels of nesting. A tree that contains itself has more.
_PLAIN_KINDS = "biufcSUmM"
_JSON_INT = 2**63
_MAX_ERRORS = 20


if TYPE_CHECKING:  # it needs torch
    from dlrover.python.rl.data.device_bytes import DeviceBytes

Buffer: TypeAlias = "memoryview | DeviceBytes"
"""Bytes in the host's memory, or on a device, from where they are copied piece by piece."""

B = TypeVar("B")


class StateTree(NamedTuple, Generic[B]):
    """``skeleton`` is UTF-8 JSON; ``buffers`` are contiguous bytes, one per array, tensor and bytes object, in order.
    They may be views of the tree's memory: do not change it while they are in use."""

    skeleton: bytes
    buffers: list[B]


def dump(tree: Any) -> StateTree[memoryview]:
    """Dump a tree; raises DataError with the location (``state['optimizer'][3]``) of each value not listed above."""
    skeleton, buffers = dump_in_place(tree, lambda tensor: _host_bytes(tensor.cpu()))
    return StateTree(skeleton, cast(list[memoryview], buffers))


def dump_in_place(tree: Any, of_device: Callable[[Any], Buffer] | None = None) -> StateTree[Buffer]:
    """Like :func:`dump`, without copying what is on a device."""
    if of_device is None and "torch" in sys.modules:
        from dlrover.python.rl.data.device_bytes import DeviceBytes  # it needs torch

        of_device = DeviceBytes
    dumper = _Dumper(of_device)
    node = dumper.node(tree, "state", 0)
    if dumper.errors:
        raise DataError(dumper.errors)
    text = json.dumps(node, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    buffers, dumper.buffers = dumper.buffers, []  # it refers to itself, and would keep the tree alive
    return StateTree(text.encode("utf-8", "surrogatepass"), buffers)


def load(skeleton: bytes, buffers: Sequence[memoryview]) -> Any:
    """Rebuild a tree from views of writable buffers, and copies of others; raises DataError if it is invalid."""
    try:
        return _value(json.loads(skeleton.decode("utf-8", "surrogatepass")), buffers)
    except (ValueError, TypeError, LookupError, AttributeError, struct.error) as error:
        raise DataError(f"not a saved state: {error}") from error


_At: TypeAlias = "tuple[_At, Any] | str"  # the location of a node: its container's location, and its key there


def _place(at: _At) -> str:
    return at if isinstance(at, str) else f"{_place(at[0])}[{at[1]!r}]"


class _Dumper:
    """Turns values into JSON nodes: scalars and lists unchanged, all others as ``{tag: content}``."""

    def __init__(self, of_device: Callable[[Any], Buffer] | None) -> None:
        self._of_device = of_device
        self.buffers: list[Buffer] = []
        self.errors: list[ConfigError] = []
        self._torch = sys.modules.get("torch")  # without torch imported, no value is a tensor
        self._containers: dict[type, Callable[[Any, _At, int], Any]] = {
            list: self._items,
            tuple: lambda value, at, depth: {"tuple": self._items(value, at, depth)},
            dict: lambda value, at, depth: {"dict": self._pairs(value, at, depth)},
            OrderedDict: lambda value, at, depth: {"odict": self._pairs(value, at, depth)},
        }

    def node(self, value: Any, at: _At, depth: int) -> Any:
        kind = type(value)
        if kind is str or kind is bool or value is None:
            return value
        if kind is int:
            return value if -_JSON_INT <= value < _JSON_INT else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack("<d", value).hex()}
        if depth >= MAX_DEPTH:
            return self._refuse(at, f"nested more than {MAX_DEPTH} levels deep, or it contains itself")
        if kind in self._containers:
            return self._containers[kind](value, at, depth + 1)
        return self._leaf(value, kind, at)

    def _items(self, value: Sequence[Any], at: _At, depth: int) -> list[Any]:
        if set(map(type, value)) == {int} and min(value) >= -_JSON_INT and max(value) < _JSON_INT:
            return list(value)  # such as the state of a random generator
        return [self.node(item, (at, index), depth) for index, item in enumerate(value)]

    def _pairs(self, value: dict[Any, Any], at: _At, depth: int) -> list[Any]:
        pairs = []
        for key, item in value.items():
            if not _is_key(key, depth):
                self._refuse(at, f"the key {key!r} cannot be saved; use str, int, bool, None and tuples of these")
            name = self.node(key, at, depth) if _is_key(key, depth) else None
            pairs.append([name, self.node(item, (at, key), depth)])
        return pairs

    def _leaf(self, value: Any, kind: type, at: _At) -> Any:
        if kind is bytes or kind is np.bytes_:
            return {"bytes" if kind is bytes else "np.bytes": self._buffer(memoryview(value).cast("B"))}
        if kind is np.str_:
            return {"np.str": str(value)}
        if kind is np.ndarray and value.dtype.kind in _PLAIN_KINDS:
            return {"array": [_dtype_name(value.dtype), value.shape, self._buffer(_array_bytes(value))]}
        if isinstance(value, np.generic) and value.dtype.kind in _PLAIN_KINDS:
            return {"scalar": [_dtype_name(value.dtype), self._buffer(_array_bytes(np.asarray(value)))]}
        if isinstance(value, np.ndarray | np.generic):
            return self._refuse(at, f"a {kind.__name__} of dtype {value.dtype} cannot be saved")
        if self._torch is not None and isinstance(value, self._torch.Tensor):
            return self._tensor(value, at)
        return self._refuse(at, f"a {kind.__name__} cannot be saved; use {_ALLOWED}")

    def _tensor(self, value: Any, at: _At) -> Any:
        torch, of_device = self._torch, self._of_device
        assert torch is not None
        assert of_device is not None
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if not plain or value.layout is not torch.strided or value.is_quantized or value.is_meta:
            layout = f"{'meta ' if value.is_meta else ''}{str(value.layout).removeprefix('torch.')}"
            kind = f"{layout} {type(value).__name__} of dtype {value.dtype}"
            return self._refuse(at, f"a {kind} cannot be saved; save dense tensors that hold data")
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        content = _host_bytes(flat) if flat.device.type == "cpu" else of_device(flat)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), self._buffer(content)]}

    def _buffer(self, content: Buffer) -> int:
        self.buffers.append(content)
        return len(self.buffers) - 1

    def _refuse(self, at: _At, fault: str) -> None:
        if len(self.errors) < _MAX_ERRORS:
            self.errors.append(ConfigError(_place(at), fault))


def _host_bytes(flat: Any) -> memoryview:
    # By DLPack, since a tensor whose numpy() was called can never be moved by its storage.
    content: Any = np.from_dlpack(flat) if flat.numel() else b""
    return memoryview(content).cast("B")


_ALLOWED = "dict, list, tuple, str, int, float, bool, None, bytes, numpy arrays and torch tensors"


def _is_key(key: Any, depth: int) -> bool:
    if type(key) is tuple:
        return depth < MAX_DEPTH and all(_is_key(item, depth + 1) for item in key)
    return key is None or type(key) in (str, int, bool)


def _dtype_name(dtype: np.dtype[Any]) -> str:
    # 'long long' has the same name by size as 'long', but scalars of another type.
    return dtype.str if np.dtype(dtype.str).char == dtype.char else dtype.newbyteorder("=").char


def _array_bytes(array: npt.NDArray[Any]) -> memoryview:
    if array.nbytes == 0:
        return memoryview(b"")
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data


def _value(node: Any, buffers: Sequence[memoryview]) -> Any:
    if isinstance(node, list):
        return [_value(item, buffers) for item in node]
    if isinstance(node, dict):
        ((tag, content),) = node.items()
        return _READERS[tag](content, buffers)
    return node


def _array(content: Sequence[Any], buffers: Sequence[memoryview]) -> npt.NDArray[Any]:
    name, shape, index = content
    dtype, buffer = np.dtype(name), buffers[index]
    if len(buffer) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(buffer)} bytes for an array {list(shape)} of {dtype}")
    array: npt.NDArray[Any] = np.ndarray(tuple(shape), dtype, buffer=buffer if len(buffer) else None)
    return array.copy() if buffer.readonly else array


def _tensor(content: Sequence[Any], buffers: Sequence[memoryview]) -> Any:
    import torch

    name, shape, index = content
    dtype, buffer = getattr(torch, name), buffers[index]
    if len(buffer) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(buffer)} bytes for a tensor {shape} of {dtype}")
    writable = bytearray(buffer) if buffer.readonly else buffer
    flat = torch.frombuffer(writable, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


_READERS: Mapping[str, Callable[[Any, Sequence[memoryview]], Any]] = {
    "dict": lambda pairs, buffers: {_value(key, buffers): _value(item, buffers) for key, item in pairs},
    "odict": lambda pairs, buffers: OrderedDict((_value(key, buffers), _value(item, buffers)) for key, item in pairs),
    "tuple": lambda items, buffers: tuple(_value(item, buffers) for item in items),
    "int": lambda digits, _: int(digits, 16),
    "float": lambda digits, _: struct.unpack("<d", bytes.fromhex(digits))[0],
    "bytes": lambda index, buffers: bytes(buffers[index]),
    "np.bytes": lambda index, buffers: np.bytes_(buffers[index]),
    "np.str": lambda text, _: np.str_(text),
    "array": _array,
    "scalar": lambda content, buffers: _array([content[0], (), content[1]], buffers)[()],
    "tensor": _tensor,
}
"""Readers of the content of a node, by its tag."""
