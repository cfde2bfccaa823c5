"""Workloads: made from the papers' parameters or from a trace, run against a live daemon, and told in figures."""
