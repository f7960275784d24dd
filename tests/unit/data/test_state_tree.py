# SPDX-License-Identifier: Apache-2.0
"""State trees: plain values there and back with the same bits and types, others refused; bytes of a device."""

import enum
import struct
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data import device_bytes
from dlrover.python.rl.data.device_bytes import DeviceBytes
from dlrover.python.rl.data.state_tree import MAX_DEPTH, StateTree, dump, load
from dlrover.python.rl.runtime.checkpoint import state_file
from dlrover.python.rl.runtime.checkpoint.state_file import read_state, write_state


def there_and_back(tree):
    """Through bytes that can be written to, as a file gives them."""
    skeleton, buffers = dump(tree)
    return load(bytes(skeleton), [memoryview(bytearray(buffer)) for buffer in buffers])


def same(a, b):
    """Equal in type and to the bit, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, np.longdouble | np.clongdouble):
        return a == b  # some of its bytes are padding
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.dtype.char, a.shape, a.tobytes()) == (b.dtype, b.dtype.char, b.shape, b.tobytes())
    if isinstance(a, torch.Tensor):
        bits = [x.reshape(-1).view(torch.uint8).tolist() if x.numel() else [] for x in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and bits[0] == bits[1]
    return a == b


# -- values -----------------------------------------------------------------------------------------------------------

PLAIN_DTYPES = st.one_of(
    hnp.boolean_dtypes(), hnp.integer_dtypes(endianness="?"), hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"), hnp.complex_number_dtypes(), hnp.byte_string_dtypes(),
    hnp.unicode_string_dtypes(), hnp.datetime64_dtypes(), hnp.timedelta64_dtypes(),
)  # fmt: skip
ARRAYS = hnp.arrays(PLAIN_DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
BARE_KEYS = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none())
KEYS = st.recursive(BARE_KEYS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
NUMBERS = st.integers() | st.floats(allow_nan=True) | st.booleans()
LEAVES = st.one_of(ANY_TEXT, NUMBERS, st.none(), st.binary(max_size=9), ARRAYS)


def containers(inner):
    lists, mappings = st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)
    return st.one_of(lists, lists.map(tuple), mappings, mappings.map(OrderedDict))


@settings(max_examples=150, deadline=None)
@given(st.recursive(LEAVES, containers, max_leaves=12))
def test_state_tree_comes_back_the_same(tree):
    assert same(there_and_back(tree), tree)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(2, 2**20))
def test_state_tree_keeps_bits_and_digits_of_numbers(bits, exponent):
    number = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    assert same(there_and_back([number, -number]), [number, -number])
    assert there_and_back([2**exponent + 1, -(2**exponent)]) == [2**exponent + 1, -(2**exponent)]


SCALARS = sorted(set(np.sctypeDict.values()) - {np.object_, np.void}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", SCALARS, ids=lambda kind: kind.__name__)
def test_state_tree_keeps_types_of_numpy_scalars(kind):
    value = kind("3") if issubclass(kind, np.str_ | np.datetime64) else kind(3)
    value = np.timedelta64(3, "ms") if kind is np.timedelta64 else value
    tree = {"x": value, "array": np.array([value])}
    assert same(there_and_back(tree), tree)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(12.0).reshape(3, 4)), np.arange(20)[::-3], np.array(5, "<M8[us]"),
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1), np.broadcast_to(np.float32(7), (2, 3)),
        np.empty((0, 3), np.int16), np.zeros(3, ">f4"),
    ],
    ids=["fortran", "strided", "0-d", "transposed", "broadcast", "empty", "big-endian"],
)  # fmt: skip
def test_state_tree_arrays_are_contiguous_and_writable(array):
    back = there_and_back({"a": array})["a"]
    assert same(back, array)
    assert back.flags.c_contiguous and back.flags.writeable


# -- tensors ----------------------------------------------------------------------------------------------------------

TENSOR_DTYPES = [
    value
    for name, value in sorted(vars(torch).items())
    if isinstance(value, torch.dtype) and "q" not in name and not name.startswith(("bits", "uint1", "int1"))
]


@pytest.mark.parametrize("dtype", sorted(set(TENSOR_DTYPES), key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3)], ids=str)
def test_state_tree_keeps_tensors_of_every_dtype(dtype, shape):
    count = int(np.prod(shape)) * dtype.itemsize
    bits = torch.arange(count, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    tensor = bits.view(dtype).reshape(shape)
    back = there_and_back({0: tensor})[0]
    assert same(back, tensor)


def test_state_tree_makes_views_plain_dense_tensors():
    base = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(base.clone())
    complex_view = torch.complex(base, -base).conj()
    back = there_and_back([base.t(), base[1], base[:, ::2], parameter, complex_view, complex_view.imag])
    originals = [base.t(), base[1], base[:, ::2], base, complex_view, complex_view.imag]
    for tensor, original in zip(back, originals, strict=True):
        assert torch.equal(tensor, original.resolve_conj().resolve_neg())
        assert type(tensor) is torch.Tensor and tensor.is_contiguous() and not tensor.requires_grad
    back[0][0, 0] = 99
    assert back[2][0, 0] == 0, "they share no storage any more"


# -- memory -----------------------------------------------------------------------------------------------------------


def test_state_tree_copies_no_contiguous_values():
    array, tensor, text = np.zeros(1000), torch.zeros(1000), bytes(1000)
    _, buffers = dump([array, tensor, text])
    addresses = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers]
    assert addresses == [array.ctypes.data, tensor.data_ptr(), np.frombuffer(text, np.uint8).ctypes.data]
    writable = memoryview(bytearray(8000))
    loaded = load(dump(array).skeleton, [writable])
    loaded[0] = 1.0
    assert bytes(writable[:8]) == struct.pack("<d", 1.0)
    back = load(dump({"a": np.zeros(2)}).skeleton, [memoryview(bytes(16))])
    back["a"][0] = 1  # a copy: that memory is read-only


# -- refused ----------------------------------------------------------------------------------------------------------


@dataclass
class Point:
    x: int


class Colour(enum.StrEnum):
    RED = "red"


PAIR = namedtuple("PAIR", "a b")
LOOP: list = []
LOOP.append({"again": LOOP})
DEEP: list = []
for _ in range(MAX_DEPTH + 1):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value",
    [
        {1, 2}, Point(1), Colour.RED, PAIR(1, 2), defaultdict(int), object(), lambda: 0, 1j, bytearray(b"x"), range(3),
        np.array([object()]), np.zeros(2, [("a", int)]), np.ma.masked_array([1]), np.void(b"x"),
        torch.zeros(2, device="meta"), torch.eye(2).to_sparse(),
        type("Mine", (torch.Tensor,), {})(), torch.Generator(), torch.float32, torch.device("cpu"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_state_tree_names_the_place_of_a_refused_value(value):
    with pytest.raises(DataError) as caught:
        dump({"optimizer": [0, 1, 2, value], ("a", 1): {"fine": 1}})
    (problem,) = caught.value.errors
    assert problem.where == "state['optimizer'][3]"
    assert type(value).__name__ in problem.what and "cannot be saved" in problem.what


def test_state_tree_lists_every_refused_place_and_key():
    with pytest.raises(DataError, match="the key 2.5 cannot be saved") as caught:
        dump({"a": {1}, "b": {2.5: 0, b"x": {3: set()}, ("ok", 1.5): 1}})
    assert [problem.where.removeprefix("state") for problem in caught.value.errors] == [
        "['a']", "['b']", "['b']", "['b'][b'x'][3]", "['b']",
    ]  # fmt: skip
    with pytest.raises(DataError) as caught:
        dump([set()] * 1000)
    assert len(caught.value.errors) == 20


@pytest.mark.parametrize("tree", [LOOP, DEEP], ids=["a loop", "too deep"])
def test_state_tree_without_an_end_is_refused(tree):
    with pytest.raises(DataError, match="levels deep, or it contains itself"):
        dump(tree)
    assert same(there_and_back(DEEP[0][0]), DEEP[0][0]), "the deepest that is allowed"


@pytest.mark.parametrize(
    "skeleton",
    [
        b"", b"{", b'{"unknown": 1}', b"{}", b'{"tuple": 3}', b'{"array": ["<f8", [2], 0]}',
        b'{"array": ["no", [1], 0]}',
        b'{"tensor": ["float32", [1], 5]}', b'{"tensor": ["nothing", [1], 0]}', b'{"tensor": ["float64", [2], 0]}',
        b'{"float": "zz"}', b"\xff", b'{"dict": [[{"dict": []}, 1]]}', b'{"array": 1}', b'{"float": "00"}',
    ],
)  # fmt: skip
def test_state_tree_refuses_a_wrong_skeleton(skeleton):
    with pytest.raises(DataError, match="not a saved state"):
        load(skeleton, [memoryview(bytes(8))])


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(device_bytes, "PIECE", 1000)
    monkeypatch.setattr(device_bytes, "_buffers", {})


@pytest.mark.parametrize("length", [0, 1, 999, 1000, 1001, 2000, 2001, 5432])
@pytest.mark.usefixtures("small_pieces")
def test_device_bytes_pieces_are_the_whole(length):
    flat = torch.randint(0, 256, (length,), dtype=torch.uint8)
    source = DeviceBytes(flat)
    assert len(source) == length
    assert b"".join(map(bytes, source.pieces())) == flat.numpy().tobytes()


@pytest.mark.usefixtures("small_pieces")
def test_device_bytes_use_two_buffers():
    pieces = chain.from_iterable(DeviceBytes(torch.arange(10_000).to(torch.uint8)).pieces() for _ in range(3))
    assert len({torch.frombuffer(piece, dtype=torch.uint8).data_ptr() for piece in pieces}) == 2


@pytest.mark.usefixtures("small_pieces")
def test_device_bytes_make_the_same_state_file(tmp_path):
    state = {"a": torch.randn(700), "b": torch.arange(9, dtype=torch.int16), "none": torch.empty(0), "c": b"xyz"}
    whole = write_state(tmp_path / "whole", {"role": "ACTOR"}, state, durable=False)
    skeleton, buffers = dump(state)
    pieces = [DeviceBytes(torch.frombuffer(part, dtype=torch.uint8)) if len(part) > 9 else part for part in buffers]
    written = write_state(tmp_path / "pieces", {"role": "ACTOR"}, StateTree(skeleton, pieces), durable=False)
    assert (written.nbytes, written.checksum) == (whole.nbytes, whole.checksum)
    read = read_state(tmp_path / "pieces", written)
    assert all(torch.equal(read[name], state[name]) for name in ("a", "b", "none")) and read["c"] == b"xyz"


@pytest.mark.usefixtures("small_pieces")
def test_device_bytes_of_a_failed_write_free_the_buffers(monkeypatch, tmp_path):
    def refuse(chunk, checksum):
        if device_bytes._one_reader.locked():  # the piece comes from the device
            raise OSError("no such luck")
        return checksum

    monkeypatch.setattr(state_file, "crc32", refuse)
    skeleton, buffers = dump([torch.ones(700)])
    flat = torch.frombuffer(buffers[0], dtype=torch.uint8)
    with pytest.raises(OSError, match="no such luck") as caught:
        write_state(tmp_path / "x", {}, StateTree(skeleton, [DeviceBytes(flat)]), durable=False)
    assert caught.tb is not None, "what was under way is still referred to"
    assert not device_bytes._one_reader.locked()
