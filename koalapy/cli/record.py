"""``koala export``: what the scheduler was told, as a file to be replayed."""

import gzip
import sys
from pathlib import Path
from typing import IO, Annotated

from koalapy.cli.arguments import Option
from koalapy.cli.client import Client
from koalapy.cli.errors import CliError, Exit
from koalapy.cli.options import DEFAULT_URL, Token, Url
from koalapy.cli.progress import Progress, Transfer


def export(
    output: Annotated[Path | None, Option("-o", "--output", help="the file; compressed if it ends in .gz")] = None,
    since: Annotated[float, Option(help="daemons that lived within so many seconds until now")] = 86400.0,
    until: Annotated[float, Option(help="up to so many seconds before now")] = 0.0,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Write what the scheduler was told and did: koala export -o day.gz; then koala replay day.gz

    For operators. Each daemon's life is written from its beginning on. Commands of jobs are in it; variables of
    programs are not.
    """
    pieces = Client(url, token).text("/api/v1/record", {"since": since, "until": until})
    if output is None:
        sys.stdout.flush()
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return
    incoming = output.with_name(f".{output.name}.incoming")
    got = Transfer(f"writes {output}")
    try:
        with Progress(lambda: str(got)), _opened(incoming, packed=output.suffix == ".gz") as file:
            for piece in got.counted(pieces):
                file.write(piece)
        incoming.rename(output)
    except OSError as error:
        raise CliError(f"cannot write {output}: {error.strerror or error}", Exit.FAILED) from error
    finally:
        incoming.unlink(missing_ok=True)


def _opened(path: Path, *, packed: bool) -> IO[bytes]:
    return gzip.open(path, "wb") if packed else path.open("wb")  # type: ignore[return-value]
