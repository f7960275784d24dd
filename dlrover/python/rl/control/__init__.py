"""The master's brain: pure functions of state and events. No Ray, clock, thread or disk."""
