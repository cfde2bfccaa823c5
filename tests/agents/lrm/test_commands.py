"""Running a resource manager's commands."""

import os

import pytest

from koalapy.agents.lrm.commands import run

LONGEST = 100_000


@pytest.mark.parametrize(("size", "code"), [(0, 0), (LONGEST, 3)])
async def test_a_short_answer_is_whole(size: int, code: int) -> None:
    script = f"head -c {size} /dev/zero; echo oh >&2; exit {code}"
    answer = await run("sh", "-c", script, longest=LONGEST)
    assert (answer.code, len(answer.output), answer.errors) == (code, size, "oh\n")


async def test_who_says_too_much_is_ended_and_not_read_to_the_end() -> None:
    answer = await run("sh", "-c", "echo $$; exec cat /dev/zero", longest=LONGEST)
    assert LONGEST < len(answer.output) <= 2 * LONGEST
    with pytest.raises(ProcessLookupError):
        os.kill(int(answer.output.split()[0]), 0)
