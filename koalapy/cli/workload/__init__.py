"""Commands that generate, run and measure workloads."""
