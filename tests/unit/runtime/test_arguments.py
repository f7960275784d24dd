# SPDX-License-Identifier: Apache-2.0
"""Calls on their way to a worker: their arguments, and what they say beside them."""

import pytest

from dlrover.python.rl.runtime.member.arguments import CallHeader, decode, encode
from dlrover.python.rl.trainer.port import Call, Ref

RESULTS = {"first": 1, "second": 2}
REFS = {name: Ref(None, name, None, "ACTOR", 0, "update", 1) for name in RESULTS}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ([REFS["first"], "plain", REFS["second"]], [1, "plain", 2]),
        ([REFS["first"]], [1]),
        (["plain"], ["plain"]),
        ([], []),
    ],
)
def test_decode_resolves_the_results_in_a_list(argument, value):
    assert decode(encode(argument), RESULTS.__getitem__) == value


def test_header_of_a_call_says_everything_but_its_arguments():
    call = Call((3, 7), "update", (1,), {"lr": 2.0}, True, epoch=2, settled=1, keep=True, after=(3, 6))
    header = CallHeader.unpack(CallHeader.of(call, incarnation=4).pack())
    assert header == ((3, 7), "update", ("lr",), True, 2, 4, 1, True, (3, 6))
