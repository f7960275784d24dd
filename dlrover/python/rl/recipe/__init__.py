"""Ready jobs: trainers and the workloads of each role."""
