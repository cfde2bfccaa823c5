"""Finds the Open MPI that programs use, if the agent's host is like the nodes."""

import os
import re
import shlex
from dataclasses import dataclass

from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.lrm.commands import run_command
from koalapy.agent.lrm.script import LOAD_MODULES


@dataclass(frozen=True, slots=True)
class OpenMpi:
    """The Open MPI that was found; ``version`` is empty and ``complaint`` says why if there is none."""

    path: str = ""
    version: str = ""
    complaint: str = ""

    @property
    def series(self) -> int:
        return int(self.version.partition(".")[0])


async def open_mpi_here(settings: AgentSettings, prefix: str | None) -> OpenMpi:
    """Return the first Open MPI on the programs' ``PATH``, or that of ``prefix``. Raise ``SiteError`` if no command can
    be run."""
    mpirun = f"{prefix}/bin/mpirun" if prefix else "mpirun"
    lines = [LOAD_MODULES.format(names=shlex.join(settings.modules))] if settings.modules else []
    if path := settings.environment.get("PATH"):
        lines.append(f'export PATH={shlex.quote(path)}:"$PATH"\n')
    lines.append(f"command -v {shlex.quote(mpirun)} && exec {shlex.quote(mpirun)} --version")
    environment = {name: value for name, value in settings.environment.items() if name != "PATH"}
    answer = await run_command("sh", "-c", "".join(lines), environment={**os.environ, **environment})
    output = answer.output.decode(errors="replace").splitlines()
    if not output:
        reason = next((line.strip() for line in answer.errors.splitlines() if line.strip()), "")
        return OpenMpi(complaint=f"{mpirun} was not found" + (f" ({reason})" if reason else ""))
    version = re.search(r"\(Open MPI\) (\d[\w.]*)", "\n".join(output[1:]))
    if version is None:
        return OpenMpi(output[0], complaint=f"{output[0]} is not Open MPI")
    return OpenMpi(output[0], version[1])
