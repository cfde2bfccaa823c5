"""Files of jobs: replicas, staged files, results."""
