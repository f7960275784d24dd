# SPDX-License-Identifier: Apache-2.0
"""Text of jobs, models and services on a terminal: it cannot move the cursor, set a title or reverse other text."""

import re

_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_ACTIVE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def inert(text: str) -> str:
    """Return ``text`` without colours, with ``\\x1b`` or ``\\u202e`` for each character that a terminal would obey:
    controls but for tabs and ends of lines, and marks that change the direction of text."""
    lines = _COLOURS.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _ACTIVE.sub(lambda character: character[0].encode("unicode_escape").decode(), lines)


def echo(text: str, err: bool = False, nl: bool = True) -> None:
    """Print ``text``, which may come from a job, to stdout or stderr."""
    import click  # child processes need this module without it

    click.echo(inert(text), err=err, nl=nl)  # noqa: TID251 -- the one place that prints
