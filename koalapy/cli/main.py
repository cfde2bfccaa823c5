"""The ``koala`` command."""

import os
import sys
from io import TextIOWrapper
from typing import cast

from koalapy.cli.errors import CliError, Exit


def main() -> None:
    """Run a command; whatever goes wrong is one line on standard error and a documented exit code."""
    import typer

    from koalapy.cli.commands import app

    # Typer brings its own copy of click in newer releases; both have this exception above BadParameter.
    click_exception = cast(type[Exception], typer.BadParameter.__mro__[2])
    code: object = Exit.OK
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="koala", standalone_mode=False)
        sys.stdout.flush()
    except CliError as error:
        print(f"koala: {error}", file=sys.stderr)
        code = error.code
    except (KeyboardInterrupt, typer.Abort):
        code = Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read has gone; what is still buffered goes nowhere, so that no complaint follows at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = Exit.FAILED
    except click_exception as error:
        print(f"koala: {_message(error)}; see koala --help", file=sys.stderr)
        code = Exit.USAGE
    sys.exit(code if isinstance(code, int) else Exit.OK)


def _message(error: Exception) -> str:
    """What Typer has against the arguments, in one line."""
    return " ".join(str(getattr(error, "format_message", lambda: error)()).split()).rstrip(".")


if __name__ == "__main__":
    main()
