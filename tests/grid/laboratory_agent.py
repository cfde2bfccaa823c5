"""Run ``koala`` with a resource manager for the kind ``slurm`` that starts runners in network namespaces.

The resource manager is the test's ``NodeManager``, at the Unix socket that ``native_specification`` names.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.lrm.port import Finding, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission, PolledLrm
from koalapy.agent.lrm.slurm import adapter
from koalapy.agent.runners.runners import write_secrets
from koalapy.cli.main import main
from koalapy.model.errors import SiteUnavailable

END_DELAY_S = 0.2


class LaboratoryLrm(PolledLrm):
    """A cluster with namespaces as nodes."""

    def __init__(self, settings: AgentSettings) -> None:
        super().__init__(settings.poll_interval)
        self._path = settings.native_specification

    async def open(self) -> None:
        await self._request("list")

    async def submit_job(self, submission: LrmSubmission) -> str:
        write_secrets(submission.workdir, submission.secrets)
        answer = await self._request(
            "submit",
            name=submission.name,
            nodes=submission.nodes,
            argv=list(submission.argv),
            environment=dict(submission.environment),
            folder=str(submission.workdir),
            output=str(submission.output),
        )
        self.poll_soon()
        return str(answer["job"])

    async def find_job(self, name: str, user: str = "") -> str | None:
        jobs = (await self._request("list"))["jobs"]
        return next((str(job["id"]) for job in jobs if job["name"] == name), None)

    async def settling_time(self) -> float:
        return 0.1

    async def cancel_job(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        await self._request("cancel", job=int(job))
        self.poll_soon(END_DELAY_S)

    async def take_snapshot(self) -> LrmSnapshot:
        answer = await self._request("list")
        jobs = tuple(
            LrmJob(
                str(job["id"]),
                job["name"],
                LrmJobState.ENDED if job["code"] is not None else LrmJobState.RUNNING,
                tuple(job["nodes"]),
                job["code"],
            )
            for job in answer["jobs"]
        )
        return LrmSnapshot(answer["total"], answer["idle"], 0, 0, jobs)

    async def read_version(self) -> str:
        return "laboratory"

    async def check_setup(self) -> Sequence[Finding]:
        return []

    async def _request(self, operation: str, **fields: object) -> dict[str, Any]:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            raise SiteUnavailable(f"the laboratory does not answer: {error}") from error
        try:
            writer.write(json.dumps({"op": operation, **fields}).encode() + b"\n")
            answer: dict[str, Any] = json.loads(await reader.readline())
        finally:
            writer.close()
        if error_text := answer.get("error"):
            raise SiteUnavailable(str(error_text))
        return answer


if __name__ == "__main__":
    adapter.make_lrm = LaboratoryLrm  # type: ignore[assignment]
    main()
