"""``koala replay``: check a record by replaying it."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.cli.terminal.options import show_json
from koalapy.cli.terminal.progress import waiting_for
from koalapy.client.client import Json
from koalapy.client.errors import CliError, Exit, printable

if TYPE_CHECKING:
    from koalapy.record.replay import History


def replay(
    file: Annotated[Path, Argument(help="as koala export wrote it")],
    as_json: Annotated[bool, Option("--json", help="for programs")] = False,
) -> int:
    """Do again what a daemon's scheduler did: koala export -o day.gz; koala replay day.gz

    Needs no daemon, and starts nothing. Compares each placement and each command with the record.
    """
    from koalapy.policies.installed import policies
    from koalapy.record.replay import replay

    found, lost = [], list[str]()
    with waiting_for(f"replays {file}"):
        found += [_told(history) for history in replay(file, policies(), lost)]
    if as_json:
        show_json({"file": str(file), "lives": found, "lost": lost})
    else:
        for told in found:
            print(_line(told))
        if not found:
            print("nothing was recorded then", file=sys.stderr)
    if any(told["divergence"] for told in found):
        raise CliError("the replay did something else than what was recorded", Exit.FAILED, _why(found))
    if lost:
        hint = "what was told there is missing; files of the record can be restored from a backup, or removed"
        raise CliError(printable(f"not all that was is in it: {'; '.join(lost)}"), Exit.FAILED, hint)
    return Exit.OK


def _told(history: "History") -> Json:
    different = history.divergence
    return {
        "began": _moment(history.began),
        "ended": _moment(history.ended),
        "version": history.version,
        "steps": history.steps,
        "jobs": len(history.jobs),
        "placements": history.placements,
        "divergence": different
        and {
            "step": different.step,
            "at": _moment(different.at),
            "recorded": different.recorded,
            "replayed": different.replayed,
        },
    }


def _line(told: Json) -> str:
    what = f"{told['began']} to {told['ended']}: {told['jobs']} jobs, {told['placements']} placements"
    if (other := told["divergence"]) is None:
        return f"{what}, all as recorded ({told['steps']} steps)"
    return f"{what}; at {other['at']}, in step {other['step']}: {other['recorded']}; replayed: {other['replayed']}"


def _why(found: list[Json]) -> str:
    from koalapy import __version__

    others = sorted({told["version"] for told in found} - {__version__})
    return f"it was written by version {', '.join(others)}, and this is {__version__}" if others else ""


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
