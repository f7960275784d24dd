"""Nearest-name hints for error messages."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to ``name``, ignoring case, or None when nothing is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def hint(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"``, or the list of known names when none is close."""
    names = sorted(known)
    close = nearest(name, names)
    if close is not None:
        return f"; did you mean '{close}'?"
    return f"; known: {', '.join(names)}" if names else ""
