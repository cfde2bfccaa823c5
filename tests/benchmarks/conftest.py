"""Ignore benchmarks of the testbed without one."""

from tests.needs import TESTBED_UP

collect_ignore = [] if TESTBED_UP.is_met else ["test_testbed_speed.py"]
