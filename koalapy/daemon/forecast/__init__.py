"""Forecasts of start times and what-if answers, computed in a thread or in a subprocess."""
