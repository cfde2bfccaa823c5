"""Benchmarks measure and do not test: they are collected by ``make bench`` only."""

import sys

collect_ignore = [] if "--benchmark-only" in sys.argv else ["benchmarks"]
