"""One or several teachers: how what they say becomes one."""

import torch

from dlrover.python.rl.algorithm.base import TokenColumns, column
from dlrover.python.rl.common.errors import DataError


def teacher_shares(columns: TokenColumns, teachers: int) -> torch.Tensor:
    """``[tokens, teachers]``, rows summing to 1: ``teacher_weights`` where there are any, else equal shares.

    A row that one teacher alone is for (its domain's) has 1 there and 0 elsewhere. Several teachers on one row are
    averaged in log-probs: the mean of ``KL(student || teacher_m)`` is the KL to their geometric mean, but for a
    constant.

    Raises:
        DataError: there are weights for another number of teachers.
    """
    reference = column(columns, "weight")
    if "teacher_weights" not in columns:
        return reference.new_full((len(reference), teachers), 1.0 / teachers)
    shares = columns["teacher_weights"]
    if shares.shape[1:] != (teachers,):
        raise DataError(f"'teacher_weights' of shape {list(shares.shape)} are not for {teachers} teachers")
    return shares
