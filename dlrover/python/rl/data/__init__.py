"""Samples, columnar batches, data files, conversations and masks."""
