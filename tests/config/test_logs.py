"""Logs as text and JSON: one line per event, and no error if they cannot be written."""

import json
import subprocess
import sys
from typing import Any

import pytest

LOGGING = """
import structlog
from koalapy.config.logs import configure_logging
configure_logging()
for number in range(3):
    structlog.get_logger().error("a line", number=number)
print("went on")
"""
TOLD = """
import asyncio, logging, sys, warnings
import structlog
from koalapy.config.logs import configure_logging
configure_logging(*sys.argv[1:], cluster="north")
log = structlog.get_logger()
log.debug("of no weight", action="a-debug")
log.info("a component", action="an-event", token="12.1.0.fa", reason="two\\nlines")
log.warning("an odd one", action="odd", token="no token", job=7, cluster="south",
    values={1, 2}, nothing=float("nan"), key={("a", 1): 2}, surrogate="\\udcff", itself=[])
def wrong():
    raise ValueError("with\\nlines")
try:
    wrong()
except ValueError as error:
    log.error("a mistake", action="bug", exc_info=error)
logging.getLogger("uvicorn.error").warning("of a %s", "library")
logging.getLogger("uvicorn.error").info("chatter")
logging.getLogger("apscheduler.scheduler").warning("skipped again")
logging.getLogger("broken").error("%d", "no number")
warnings.warn("watch out")
async def fails():
    asyncio.get_running_loop().call_exception_handler({"message": "in a task", "exception": ValueError("x")})
asyncio.run(fails())
"""


@pytest.mark.processes
def test_log_on_full_disk_raises_no_error() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run([sys.executable, "-c", LOGGING], stdout=subprocess.PIPE, stderr=full, check=False)
    assert ran.stdout == b"went on\n"


def logged_lines(*how: str) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", TOLD, *how], capture_output=True, text=True, check=True)
    return ran.stderr.splitlines()


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    return [json.loads(line) for line in logged_lines("info", "json")]


def test_json_log_has_one_object_per_line(objects: list[dict[str, Any]]) -> None:
    assert [entry["action"] for entry in objects] == ["an-event", "odd", "bug", *["library"] * 4]
    for entry in objects:
        assert list(entry)[:4] == ["timestamp", "level", "action", "event"]
    first, odd, bug, *_ = objects
    assert (first["job"], first["cluster"], first["reason"]) == (12, "north", "two\nlines")
    assert (odd["job"], odd["cluster"]) == (7, "south"), "what is said stands"
    assert odd["nothing"] == "nan"
    assert bug["error"] == "ValueError('with\\nlines')"
    assert "in wrong\n" in bug["traceback"]


def test_library_records_are_logged_in_the_same_format(objects: list[dict[str, Any]]) -> None:
    by_library = {entry["library"]: entry for entry in objects if entry["action"] == "library"}
    assert by_library["uvicorn.error"]["event"] == "of a library"
    assert by_library["uvicorn.error"]["level"] == "warning"
    assert by_library["broken"]["event"] == "%d"
    assert "watch out" in by_library["py.warnings"]["event"]
    assert by_library["asyncio"]["error"] == "ValueError('x')"


@pytest.mark.processes
def test_text_log_has_one_line_per_event() -> None:
    lines = logged_lines("warning", "console")
    assert len(lines) == 6
    assert all(line.startswith("timestamp='") for line in lines)
    assert "level='error' event='a mistake' action='bug'" in lines[1]
    assert "Traceback" in lines[1]


@pytest.mark.processes
def test_log_below_minimum_level_is_omitted() -> None:
    assert json.loads(logged_lines("debug", "json")[0])["action"] == "a-debug"
    assert [json.loads(line)["level"] for line in logged_lines("error", "json")] == ["error"] * 3
    assert logged_lines("critical", "json") == []
