"""End the command without a traceback at an interrupt, also while modules are imported and at exit.

Only the function of a command gets ``KeyboardInterrupt``. Elsewhere Python would print a traceback, or lose the
interrupt in a callback of an import. Imports little, since it is imported first.
"""

import os
import signal

EXIT_CODE = 130
"""``Exit.INTERRUPTED``, which takes longer to import."""


def exit_at_interrupt() -> None:
    """End the process at once at an interrupt from now on."""
    signal.signal(signal.SIGINT, _exit_process)


def raise_at_interrupt() -> None:
    """Raise ``KeyboardInterrupt`` at an interrupt from now on, if ``exit_at_interrupt`` was called before."""
    if signal.getsignal(signal.SIGINT) is _exit_process:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether an interrupt caused an error: code that runs during imports may replace the interrupt by it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _exit_process(*_: object) -> None:
    os._exit(EXIT_CODE)
