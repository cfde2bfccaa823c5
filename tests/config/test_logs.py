"""Logs are for people or programs: a line for each event, and that they cannot be written stops nobody."""

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
def test_a_full_disk_below_the_log_is_survived() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run([sys.executable, "-c", LOGGING], stdout=subprocess.PIPE, stderr=full, check=False)
    assert ran.stdout == b"went on\n"


def said(*how: str) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", TOLD, *how], capture_output=True, text=True, check=True)
    return ran.stderr.splitlines()


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    return [json.loads(line) for line in said("info", "json")]


def test_programs_get_one_object_in_each_line(objects: list[dict[str, Any]]) -> None:
    assert [one["action"] for one in objects] == ["an-event", "odd", "bug", *["library"] * 4]
    for one in objects:
        assert list(one)[:4] == ["timestamp", "level", "action", "event"]
    first, odd, bug, *_ = objects
    assert (first["job"], first["cluster"], first["reason"]) == (12, "north", "two\nlines")
    assert (odd["job"], odd["cluster"]) == (7, "south"), "what is said stands"
    assert odd["nothing"] == "nan"
    assert bug["error"] == "ValueError('with\\nlines')"
    assert "in wrong\n" in bug["traceback"]


def test_what_libraries_say_is_said_alike(objects: list[dict[str, Any]]) -> None:
    known = {one["library"]: one for one in objects if one["action"] == "library"}
    assert known["uvicorn.error"]["event"] == "of a library"
    assert known["uvicorn.error"]["level"] == "warning"
    assert known["broken"]["event"] == "%d"
    assert "watch out" in known["py.warnings"]["event"]
    assert known["asyncio"]["error"] == "ValueError('x')"


@pytest.mark.processes
def test_people_get_one_line_for_each_event_as_well() -> None:
    lines = said("warning", "console")
    assert len(lines) == 6
    assert all(line.startswith("timestamp='") for line in lines)
    assert "level='error' event='a mistake' action='bug'" in lines[1]
    assert "Traceback" in lines[1]


@pytest.mark.processes
def test_what_weighs_less_is_not_told() -> None:
    assert json.loads(said("debug", "json")[0])["action"] == "a-debug"
    assert [json.loads(line)["level"] for line in said("error", "json")] == ["error"] * 3
    assert said("critical", "json") == []
