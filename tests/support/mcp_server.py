# SPDX-License-Identifier: Apache-2.0
"""A server of tools on standard input and output."""

from mcp.server import MCPServer

server = MCPServer("sums")


@server.tool()
def add(first: int, second: int = 1) -> str:
    """The sum."""
    return str(first + second)


if __name__ == "__main__":
    server.run()
