"""Metrics, traces, the audit log and the job log."""
