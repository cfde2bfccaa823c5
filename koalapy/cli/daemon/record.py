"""``koala export`` and ``koala replay``: export a record of the scheduler, and verify it by a replay."""

import gzip
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, cast

from koalapy import __version__
from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.cli.terminal.options import DAEMON, Daemon, show_json
from koalapy.cli.terminal.progress import Progress, Transfer, waiting_for
from koalapy.cli.terminal.streams import ProgramOutput
from koalapy.client.answers import Json
from koalapy.client.errors import CliError, Exit, printable

if TYPE_CHECKING:
    from koalapy.record.replay import History


def export_record(
    output: Annotated[
        Path | None, Option("-o", "--output", help="output file, compressed if its name ends in .gz")
    ] = None,
    since: Annotated[float, Option(help="daemon runs within so many seconds until now")] = 86400.0,
    until: Annotated[float, Option(help="until so many seconds before now")] = 0.0,
    daemon: Daemon = DAEMON,
) -> None:
    """Export the scheduler's input and decisions: koala export -o day.gz; then koala replay day.gz

    For operators. Each daemon run is exported from its beginning. The export contains commands of jobs, but no
    variables of programs.
    """
    pieces = daemon.client().stream_text("/api/v1/record", {"since": since, "until": until})
    if output is None:
        ProgramOutput().write_all(pieces)
        return
    if not output.name or output.is_dir():
        raise CliError(f"{output} is a folder", Exit.USAGE, "give a file: --output day.gz")
    # Write to a pipe, a terminal or the target of a link in place; replace only regular files.
    is_new = not output.is_symlink() and (output.is_file() or not output.exists())
    incoming = output.with_name(f".{output.name}.incoming") if is_new else output
    transfer = Transfer(f"writes {output}")
    try:
        with (
            Progress(lambda: str(transfer)),
            _open_output(incoming, is_new=is_new, packed=output.suffix == ".gz") as file,
        ):
            for piece in transfer.count_bytes(pieces):
                file.write(piece)
        if is_new:
            incoming.rename(output)
    except OSError as error:
        raise CliError(f"cannot write {output}: {error.strerror or error}", Exit.FAILED) from error
    finally:
        if is_new:
            incoming.unlink(missing_ok=True)


@contextmanager
def _open_output(path: Path, *, is_new: bool, packed: bool) -> Iterator[IO[bytes]]:
    """Open a file for writing. A new file is readable by this account only, since it contains the commands of jobs."""
    if is_new:
        path.unlink(missing_ok=True)
    how = os.O_WRONLY | (os.O_CREAT | os.O_EXCL if is_new else os.O_TRUNC)
    with os.fdopen(os.open(path, how, 0o600), "wb") as plain:
        if not packed:
            yield plain
            return
        with gzip.GzipFile(filename="", mode="wb", fileobj=plain) as file:
            yield cast(IO[bytes], file)


def replay_export(
    file: Annotated[Path, Argument(help="file written by koala export")],
    as_json: Annotated[bool, Option("--json", help="print JSON")] = False,
) -> int:
    """Replay an export and compare every decision: koala export -o day.gz; koala replay day.gz

    Needs no daemon and starts nothing.
    """
    from koalapy.policies.registry import load_policies
    from koalapy.record.replay import replay

    runs, lost = [], list[str]()
    with waiting_for(f"replays {file}"):
        runs += [_history_json(history) for history in replay(file, load_policies(), lost)]
    if as_json:
        show_json({"file": str(file), "lives": runs, "lost": lost})
    else:
        for run in runs:
            summary = f"{run['began']} to {run['ended']}: {run['jobs']} jobs, {run['placements']} placements"
            if (divergence := run["divergence"]) is None:
                print(f"{summary}, all as recorded ({run['steps']} steps)")
            else:
                location = f"at {divergence['at']}, in step {divergence['step']}"
                print(f"{summary}; {location}: {divergence['recorded']}; replayed: {divergence['replayed']}")
        if not runs:
            print("nothing was recorded then", file=sys.stderr)
    if any(run["divergence"] for run in runs):
        versions = sorted({run["version"] for run in runs} - {__version__})
        hint = f"it was written by version {', '.join(versions)}; this is {__version__}" if versions else ""
        raise CliError("the replay differs from the record", Exit.FAILED, hint)
    if lost:
        hint = "restore the missing files of the record from a backup, or remove the damaged ones"
        raise CliError(printable(f"the record is incomplete: {'; '.join(lost)}"), Exit.FAILED, hint)
    return Exit.OK


def _history_json(history: "History") -> Json:
    """Convert the replay of one daemon run to JSON. ``divergence`` is null if every decision was repeated."""
    divergence = history.divergence
    return {
        "began": _format_time(history.began),
        "ended": _format_time(history.ended),
        "version": history.version,
        "steps": history.steps,
        "jobs": len(history.jobs),
        "placements": history.placements,
        "divergence": divergence
        and {
            "step": divergence.step,
            "at": _format_time(divergence.at),
            "recorded": divergence.recorded,
            "replayed": divergence.replayed,
        },
    }


def _format_time(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds")
