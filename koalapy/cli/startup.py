"""What the command does until its function runs: end quietly at an interrupt, and collect no garbage.

Only the function of a command gets ``KeyboardInterrupt``. Elsewhere Python would print a traceback, or lose the
interrupt in a callback of an import. Imports little, since it is imported first.
"""

import gc
import os
import signal

EXIT_CODE = 130
"""``Exit.INTERRUPTED``, which takes longer to import."""


def begin_imports() -> None:
    """End the process at once at an interrupt from now on, and collect no garbage: imports leave hardly any."""
    gc.disable()
    signal.signal(signal.SIGINT, _exit_process)


def begin_command() -> None:
    """Raise ``KeyboardInterrupt`` at an interrupt and collect garbage from now on, after ``begin_imports``."""
    if signal.getsignal(signal.SIGINT) is _exit_process:
        gc.enable()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def begin_exit() -> None:
    """End the process at once at an interrupt from now on, without a last collection of garbage, which takes 15 ms."""
    gc.freeze()
    signal.signal(signal.SIGINT, _exit_process)


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether an interrupt caused an error: code that runs during imports may replace the interrupt by it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _exit_process(*_: object) -> None:
    os._exit(EXIT_CODE)
