"""The papers' experiments, made again by the production scheduler in the simulated world."""
