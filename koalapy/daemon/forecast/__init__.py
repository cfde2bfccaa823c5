"""Forecasts of start times, what-if answers and fair-share figures, computed beside the loop or in a subprocess."""
