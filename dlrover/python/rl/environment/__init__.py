"""Environments, verifiers and built-in tasks."""
