"""The public contract: trainers, workloads, and the calls between them. Neither torch nor Ray is imported here."""
