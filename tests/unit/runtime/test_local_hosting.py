# SPDX-License-Identifier: Apache-2.0
"""Workers without processes of their own, as a session starts them."""

import pytest

from dlrover.python.rl.common.errors import WorkloadStartError
from dlrover.python.rl.runtime.local import LocalHosting
from dlrover.python.rl.trainer.workload import BaseWorkload

calls = []


class Failing(BaseWorkload):
    """The last rank cannot be made."""

    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        if self.rank == self.world_size - 1:
            raise ValueError("no memory")
        calls.append(("made", self.rank))

    def close(self):
        calls.append(("closed", self.rank))


def test_ranks_that_have_started_are_closed_when_a_later_one_cannot():
    calls.clear()
    hosting = LocalHosting(count=3)
    with pytest.raises(WorkloadStartError, match="no memory"):
        hosting.start("ACTOR", [[0], [1], [2]], f"{__name__}:Failing")
    assert calls == [("made", 0), ("made", 1), ("closed", 1), ("closed", 0)]
    hosting.close()
