"""Tests of the dashboard, in a browser if one is installed, and by HTTP."""
