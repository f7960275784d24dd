# SPDX-License-Identifier: Apache-2.0
"""Agents that ask nothing, and others that are none."""


async def run(client, row, depth=1):
    return row["value"] * depth


class Made:
    def __init__(self, depth=1):
        self._depth = depth

    async def run(self, client, row):
        return row["value"] * self._depth


def plain(client, row):
    return 0.0


async def lonely(client):
    return 0.0
