"""Processes on a Ray cluster."""
