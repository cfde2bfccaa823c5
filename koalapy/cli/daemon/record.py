"""``koala export``: what the scheduler was told, as a file to be replayed."""

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, cast

from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, Daemon
from koalapy.cli.terminal.progress import Progress, Transfer
from koalapy.cli.terminal.streams import ProgramOutput
from koalapy.client.errors import CliError, Exit


def export(
    output: Annotated[Path | None, Option("-o", "--output", help="the file; compressed if it ends in .gz")] = None,
    since: Annotated[float, Option(help="daemons that lived within so many seconds until now")] = 86400.0,
    until: Annotated[float, Option(help="up to so many seconds before now")] = 0.0,
    daemon: Daemon = DAEMON,
) -> None:
    """Write what the scheduler was told and did: koala export -o day.gz; then koala replay day.gz

    For operators. Each daemon's life is written from its beginning on. Commands of jobs are in it; variables of
    programs are not.
    """
    pieces = daemon.client().text("/api/v1/record", {"since": since, "until": until})
    if output is None:
        ProgramOutput().copy(pieces)
        return
    if not output.name or output.is_dir():
        raise CliError(f"{output} is a folder", Exit.USAGE, "name a file in it: --output day.gz")
    # A pipe, a terminal, or what a link leads to is written to, and not replaced.
    is_new = not output.is_symlink() and (output.is_file() or not output.exists())
    incoming = output.with_name(f".{output.name}.incoming") if is_new else output
    got = Transfer(f"writes {output}")
    try:
        with Progress(lambda: str(got)), _opened(incoming, is_new=is_new, packed=output.suffix == ".gz") as file:
            for piece in got.counted(pieces):
                file.write(piece)
        if is_new:
            incoming.rename(output)
    except OSError as error:
        raise CliError(f"cannot write {output}: {error.strerror or error}", Exit.FAILED) from error
    finally:
        if is_new:
            incoming.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path, *, is_new: bool, packed: bool) -> Iterator[IO[bytes]]:
    """A new file is one that nobody else may read: commands are in it, as in the record itself."""
    if is_new:
        path.unlink(missing_ok=True)
    how = os.O_WRONLY | (os.O_CREAT | os.O_EXCL if is_new else os.O_TRUNC)
    with os.fdopen(os.open(path, how, 0o600), "wb") as plain:
        if not packed:
            yield plain
            return
        with gzip.GzipFile(filename="", mode="wb", fileobj=plain) as file:
            yield cast(IO[bytes], file)
