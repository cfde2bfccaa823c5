"""The testbed's figures need a testbed."""

from tests.grid.testbed import is_up

collect_ignore = [] if is_up() else ["test_testbed_speed.py"]
