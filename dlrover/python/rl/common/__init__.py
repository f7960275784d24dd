"""Words everyone shares: roles, errors, clock, names. Standard library only."""
