# SPDX-License-Identifier: Apache-2.0
"""The worker of verl's group, in a separate module because it cannot be defined without verl."""

from typing import Any

from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register


def _doubled(data: DataProto) -> DataProto:
    return DataProto.from_single_dict({"x": 2 * data.batch["x"]})


class VerlWorker(Worker):  # type: ignore[misc]
    """A worker like any side's."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def nothing(self) -> None:
        """Take nothing, give nothing."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def take(self, array: Any) -> int:
        """Give the number of rows."""
        return len(array)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)  # type: ignore[untyped-decorator]
    def double(self, data: DataProto) -> DataProto:
        """Give twice the column ``x``."""
        return _doubled(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)  # type: ignore[untyped-decorator]
    def double_later(self, data: DataProto) -> DataProto:
        """Give it without being waited for."""
        return _doubled(data)
