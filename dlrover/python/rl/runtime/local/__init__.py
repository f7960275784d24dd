"""Everything in one process, without Ray: breakpoints work."""
