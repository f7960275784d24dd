"""Describing a job: typed specifications, files, overrides, the builder. Imports no engine and no Ray."""
