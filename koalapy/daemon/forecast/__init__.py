"""Forecasts of start times, what-if answers and fair-share figures, computed in a thread or in a subprocess."""
