"""``koala mpirun``, inside a job's script."""

import os
from typing import Annotated

from koalapy.cli.terminal.arguments import Argument
from koalapy.client.errors import CliError, Exit

VARIABLE = "KOALA_MPIRUN"
"""Variable of scripts with the path of the runner's ``mpirun``."""


def start_program(
    arguments: Annotated[
        list[str] | None,
        Argument(help="options of mpirun, the program and its arguments", takes_rest=True, takes_options=True),
    ] = None,
) -> int | None:
    """Start a program on all nodes of a job, inside the job's script. koala mpirun --help there lists its options."""
    path = os.environ.get(VARIABLE)
    if not path:
        hint = "write it into a script, and submit that: koala submit job.sh"
        raise CliError("koala mpirun starts programs inside the script of a job only", Exit.NOT_ALLOWED, hint)
    try:
        os.execv(path, [path, *(arguments or [])])
    except OSError as error:
        hint = "its nodes are no longer available"
        raise CliError("the job of this script has ended", Exit.NOT_ALLOWED, hint) from error
