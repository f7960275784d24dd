# SPDX-License-Identifier: Apache-2.0
"""A state tree: every plain value there and back, the same bits and type; all else is refused by name."""

import enum
import json
import struct
import sys
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.state_tree import MAX_DEPTH, dump, load


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
LEAVES = st.one_of(
    ANY_TEXT, st.integers(), st.floats(allow_nan=True), st.booleans(), st.none(), st.binary(max_size=9), ARRAYS
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_a_tree_comes_back_the_same(tree):
    assert same(there_and_back(tree), tree)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(2, 2**20))
def test_floats_keep_their_bits_and_integers_their_digits(bits, exponent):
    number = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    assert same(there_and_back([number, -number]), [number, -number])
    assert there_and_back([2**exponent + 1, -(2**exponent)]) == [2**exponent + 1, -(2**exponent)]


SCALARS = sorted(set(np.sctypeDict.values()) - {np.object_, np.void}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", SCALARS, ids=lambda kind: kind.__name__)
def test_every_scalar_of_numpy_keeps_its_type(kind):
    value = kind("3") if issubclass(kind, np.str_ | np.timedelta64 | np.datetime64) else kind(3)
    if kind is np.timedelta64:
        value = np.timedelta64(3, "ms")
    back = there_and_back({"x": value, "array": np.array([value])})
    assert same(back["x"], value)
    assert same(back["array"], np.array([value]))


def test_texts_of_numpy_keep_trailing_zeros():
    for value in (np.bytes_(b"a\0\0"), np.str_("a\0")):
        back = there_and_back([value])[0]
        assert type(back) is type(value)
        assert bytes(back) == bytes(value) if isinstance(value, bytes) else str(back) == str(value)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(20)[::-3],
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
        np.broadcast_to(np.float32(7), (2, 3)),
        np.array(5, "<M8[us]"),
        np.empty((0, 3), np.int16),
        np.zeros(3, ">f4"),
    ],
    ids=["fortran", "strided", "transposed", "broadcast", "0-d", "empty", "big-endian"],
)
def test_arrays_come_back_contiguous_and_writable(array):
    back = there_and_back({"a": array})["a"]
    assert same(back, array)
    assert back.flags.c_contiguous
    assert back.flags.writeable


def test_the_random_states_of_numpy_and_python_go_on_where_they_stood():
    import random

    old, new, plain = np.random.RandomState(7), np.random.default_rng(7), random.Random(7)
    for generator in (old, new, plain):
        generator.random()
    states = there_and_back({"old": old.get_state(), "new": new.bit_generator.state, "plain": plain.getstate()})
    again_old, again_new, again_plain = np.random.RandomState(), np.random.default_rng(), random.Random()
    again_old.set_state(states["old"])
    again_new.bit_generator.state = states["new"]
    again_plain.setstate(states["plain"])
    assert (old.random(), new.random(), plain.random()) == (
        again_old.random(),
        again_new.random(),
        again_plain.random(),
    )


# -- tensors ----------------------------------------------------------------------------------------------------------

TENSOR_DTYPES = [
    value
    for name, value in sorted(vars(torch).items())
    if isinstance(value, torch.dtype) and "q" not in name and not name.startswith(("bits", "uint1", "int1"))
]


@pytest.mark.parametrize("dtype", sorted(set(TENSOR_DTYPES), key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3)], ids=str)
def test_tensors_of_every_dtype_come_back(dtype, shape):
    count = int(np.prod(shape)) * dtype.itemsize
    bits = torch.arange(count, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    tensor = bits.view(dtype).reshape(shape)
    back = there_and_back({0: tensor})[0]
    assert same(back, tensor)


def test_views_parameters_and_gradients_come_back_as_plain_dense_tensors():
    base = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(base.clone())
    complex_view = torch.complex(base, -base).conj()
    back = there_and_back([base.t(), base[1], base[:, ::2], parameter, complex_view, complex_view.imag])
    originals = [base.t(), base[1], base[:, ::2], base, complex_view, complex_view.imag]
    for found, original in zip(back, originals, strict=True):
        assert torch.equal(found, original.resolve_conj().resolve_neg())
        assert type(found) is torch.Tensor
        assert found.is_contiguous()
        assert not found.requires_grad
    back[0][0, 0] = 99
    assert back[2][0, 0] == 0, "they share no storage any more"


def test_an_optimizer_goes_on_to_the_bit():
    def trained(model, optimizer, steps):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.full((2, 3), float(step))).sum().backward()
            optimizer.step()

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained(model, optimizer, 3)
    saved = there_and_back({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    again = torch.nn.Linear(3, 2)
    again.load_state_dict(saved["model"])
    optimizer_again = torch.optim.AdamW(again.parameters(), lr=0.5)
    optimizer_again.load_state_dict(saved["optimizer"])
    trained(model, optimizer, 2)
    trained(again, optimizer_again, 2)
    assert same(again.state_dict(), model.state_dict())
    assert same(optimizer_again.state_dict(), optimizer.state_dict())


def test_torch_is_not_imported_for_a_tree_without_tensors():
    import subprocess

    code = (
        "import sys; from dlrover.python.rl.data.state_tree import dump, load; import numpy as np;"
        "load(*dump({'a': np.ones(3), 'b': [1, b'x']})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# -- memory -----------------------------------------------------------------------------------------------------------


def test_contiguous_values_are_not_copied():
    array, tensor, text = np.zeros(1000), torch.zeros(1000), bytes(1000)
    _, buffers = dump([array, tensor, text])
    addresses = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers]
    assert addresses == [array.ctypes.data, tensor.data_ptr(), np.frombuffer(text, np.uint8).ctypes.data]
    writable = memoryview(bytearray(8000))
    loaded = load(dump(array).skeleton, [writable])
    loaded[0] = 1.0
    assert bytes(writable[:8]) == struct.pack("<d", 1.0)


def test_views_of_what_cannot_be_written_to_are_copied():
    skeleton, _ = dump({"a": np.zeros(2), "t": torch.zeros(2)})
    back = load(skeleton, [memoryview(bytes(16)), memoryview(bytes(8))])
    back["a"][0] = back["t"][0] = 1


# -- refused ----------------------------------------------------------------------------------------------------------


@dataclass
class Point:
    x: int


class Colour(enum.StrEnum):
    RED = "red"


PAIR = namedtuple("PAIR", "a b")  # noqa: PYI024
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
def test_what_cannot_be_saved_is_named_by_its_place(value):
    with pytest.raises(DataError) as caught:
        dump({"optimizer": [0, 1, 2, value], ("a", 1): {"fine": 1}})
    (problem,) = caught.value.errors
    assert problem.where == "state['optimizer'][3]"
    assert type(value).__name__ in problem.what
    assert "cannot be saved" in problem.what


def test_every_place_is_listed_and_keys_are_looked_at_too():
    with pytest.raises(DataError) as caught:
        dump({"a": {1}, "b": {2.5: 0, b"x": {3: set()}, ("ok", 1.5): 1}})
    assert [problem.where for problem in caught.value.errors] == [
        "state['a']", "state['b']", "state['b']", "state['b'][b'x'][3]", "state['b']",
    ]  # fmt: skip
    assert "the key 2.5 cannot be saved" in str(caught.value)
    with pytest.raises(DataError) as caught:
        dump([set()] * 1000)
    assert len(caught.value.errors) == 20


@pytest.mark.parametrize("tree", [LOOP, DEEP], ids=["a loop", "too deep"])
def test_a_tree_without_an_end_is_refused(tree):
    with pytest.raises(DataError, match="levels deep, or it contains itself"):
        dump(tree)


def test_the_deepest_tree_that_is_allowed_works():
    tree = ()
    for level in range(MAX_DEPTH - 1):
        tree = {"x": tree} if level % 2 else (tree,)
    assert same(there_and_back(tree), tree)


@pytest.mark.parametrize(
    "skeleton",
    [
        b"", b"{", b'{"unknown": 1}', b"{}", b'{"tuple": 3}', b'{"array": ["<f8", [2], 0]}',
        b'{"array": ["no", [1], 0]}',
        b'{"tensor": ["float32", [1], 5]}', b'{"tensor": ["nothing", [1], 0]}', b'{"tensor": ["float64", [2], 0]}',
        b'{"float": "zz"}', b"\xff", b'{"dict": [[{"dict": []}, 1]]}', b'{"array": 1}', b'{"float": "00"}',
    ],
)  # fmt: skip
def test_a_skeleton_that_is_none_or_does_not_fit_is_refused(skeleton):
    with pytest.raises(DataError, match="not a saved state"):
        load(skeleton, [memoryview(bytes(8))])


def test_the_skeleton_is_json():
    skeleton, buffers = dump({"lr": 0.1, "steps": [1, 2], 3: (None, True)})
    assert buffers == []
    assert json.loads(skeleton) == {"dict": [["lr", 0.1], ["steps", [1, 2]], [3, {"tuple": [None, True]}]]}
