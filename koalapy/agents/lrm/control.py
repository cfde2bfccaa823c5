"""How jobs are handed to a resource manager and ended: by its own commands, or by its DRMAA library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from koalapy.agents.lrm.port import Finding, LrmSubmission


class JobControl(Protocol):
    """The acting half of a resource manager. Errors: ``SiteUnavailable`` (try again), ``SiteRejected`` (do not)."""

    async def open(self) -> None:
        """Get ready to act; called once."""

    async def close(self) -> None:
        """Let go of what is held; jobs go on."""

    async def submit(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        """Hand in ``script`` under the submission's name, working directory and output file; the job's id.

        ``native`` are all further options (nodes, walltime, partition or queue and so on), one word each, as the
        resource manager's own command for handing in takes them.
        """
        ...

    async def cancel(self, job: str) -> None:
        """End a job and everything it started; one that has ended or is not known is no error."""

    async def trouble(self) -> str:
        """Why no job could be handed in now, in one line; empty when nothing is known to be in the way. Cheap."""
        ...

    async def check(self) -> Sequence[Finding]:
        """What an operator should know of it; raises nothing."""
        ...
