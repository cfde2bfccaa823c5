"""Forecasts of waiting times and of shares, computed in a subprocess."""
