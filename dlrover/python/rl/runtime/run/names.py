# SPDX-License-Identifier: Apache-2.0
"""The names of the files in a run's folder, for clients that read them elsewhere."""

METRICS, SUMMARY = "metrics.jsonl", "summary.json"  # the metrics of each step, and the final ones
DESCRIPTION, MODEL = "job.yaml", "model"
LOGS, SUFFIX = "logs", ".log"
