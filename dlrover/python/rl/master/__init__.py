"""The master: its loop, the command line, progress, submitting."""
