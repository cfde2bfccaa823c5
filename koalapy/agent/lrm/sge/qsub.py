"""Jobs handed in and ended by Grid Engine's own commands, where no DRMAA library is to be used."""

from collections.abc import Sequence
from pathlib import Path

from koalapy.agent.lrm.commands import printed_job
from koalapy.agent.lrm.port import Finding, LrmSubmission
from koalapy.agent.lrm.refusals import fault_of
from koalapy.agent.lrm.sge.commands import SgeCommands
from koalapy.model.errors import SiteError, SiteFault, SiteRejected

GONE = ("does not exist", "already in deletion", "registered the job")


class QsubControl:
    """Implements ``JobControl``, for each account by itself."""

    def __init__(self, commands: SgeCommands) -> None:
        self._commands = commands

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def submit(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        own = ("-terse", "-N", submission.name, "-wd", str(submission.workdir), "-o", str(submission.output), "-j", "y")
        answer = await self._commands.run("qsub", *own, *native, str(script), user=submission.user)
        if answer.code != 0:
            words = " ".join((answer.errors or answer.output.decode(errors="replace")).split())
            text = f"qsub: {words or answer.error_line}"
            raise SiteRejected(text, fault=SiteFault(fault_of(text)))
        return printed_job("qsub", answer)

    async def cancel(self, job: str, user: str = "") -> None:
        answer = await self._commands.run("qdel", job, user=user)
        said = answer.output.decode(errors="replace") + answer.errors
        if answer.code != 0 and not any(words in said for words in GONE):
            raise SiteRejected(f"qdel: {answer.error_line}", value=job)

    async def submit_error(self) -> str:
        return ""

    async def check(self, nodes: int = 1) -> Sequence[Finding]:
        try:
            await self._commands.run("qsub", "-help")
        except SiteError as error:
            return [Finding("qsub", False, error.message, error.hint)]
        return [Finding("qsub", True, "hands jobs in, and qdel ends them")]
