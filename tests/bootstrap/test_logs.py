"""Logs are for people: that they cannot be written stops nobody."""

import subprocess
import sys

LOGGING = """
import structlog
from koalapy.bootstrap.logs import configure_logging
configure_logging()
for number in range(3):
    structlog.get_logger().error("a line", number=number)
print("went on")
"""


def test_a_full_disk_below_the_log_is_survived() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run([sys.executable, "-c", LOGGING], stdout=subprocess.PIPE, stderr=full, check=False)
    assert ran.stdout == b"went on\n"
