# SPDX-License-Identifier: Apache-2.0
"""A seeded bug: a replacement of text in one file of the package."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """``old``, which is once in ``file``, becomes ``new``."""

    file: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        if source.count(self.old) != 1:
            raise LookupError(f"{self.file} holds {source.count(self.old)} times: {self.old!r}")
        return source.replace(self.old, self.new)
