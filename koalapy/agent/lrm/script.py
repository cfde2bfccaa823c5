"""Write the script that a resource manager runs for one component, and find the Open MPI that such scripts find.

The script starts the runner on each node. It contains all data of the runner, since every local user may read the job
data of the resource manager. So the script is on a file system that the nodes share, readable by its owner only. Each
node's secret is in a separate file until its runner reads and removes it, since the script's variables are in its
shell's environment.
"""

import asyncio
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.lrm.commands import run_command
from koalapy.agent.lrm.port import LrmSubmission
from koalapy.agent.runners.runners import secret_files, write_secrets
from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable

Fanout = Literal["srun", "qrsh", "none"]

LOAD_MODULES = """\
command -v module >/dev/null 2>&1 || for init in /etc/profile.d/modules.sh /etc/profile.d/lmod.sh \\
    /usr/share/modules/init/sh /usr/share/lmod/lmod/init/sh; do
    if [ -r "$init" ]; then . "$init"; break; fi
done
module load {names} || {{ echo "koala: cannot load the modules {names}" >&2; exit 1; }}
"""
# A shell starts the runner, so that a missing program ends with 127 as on other clusters. Binding is disabled, since
# the runner is the only task of a node and needs all its processors; the default of sites would give it one. Where no
# plugin binds, the option is left out: srun would print a warning into each job's output. A job that shares its nodes
# is bound to its own processors there.
SRUN_TEMPLATE = """\
bind=--cpu-bind={bind}
case "$(scontrol show config 2>/dev/null | grep '^TaskPlugin ')" in
    *affinity* | *cgroup* | '') ;;
    *) bind= ;;
esac
exec srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --mpi=none \\
    $bind{cpus} --export=ALL /bin/sh -c 'exec "$@"' koala {argv}
"""
# Start once on each host of the host file, which has a line for each queue instance. The first one is this host. The
# others are started by qrsh, so that Grid Engine ends them with the job; they run this script again, since qrsh joins
# its arguments to one line for a shell.
QRSH_TEMPLATE = """\
if [ "${{1:-}}" = node ]; then
    KOALA_NODE_INDEX=$2 KOALA_NODE=$3 exec {argv}
fi
index=0
hosts=' '
while read -r host _; do
    case "$hosts" in *" $host "*) continue ;; esac
    hosts="$hosts$host "
    if [ "$index" = 0 ]; then
        KOALA_NODE_INDEX=0 KOALA_NODE=$host {argv} &
    else
        qrsh -inherit -nostdin "$host" /bin/sh {script} node "$index" "$host" &
    fi
    pids="${{pids:-}} $!"
    index=$((index + 1))
done < "$PE_HOSTFILE"
code=0
for pid in $pids; do
    wait "$pid" || code=$?
done
exit $code
"""


async def place_script(submission: LrmSubmission, fanout: Fanout, folders: JobFolders) -> Path:
    """Write the script as the component's account, and return its path. Raise ``SiteError``."""
    if not submission.user:
        return await asyncio.to_thread(write_script, submission, fanout)
    path = submission.workdir / "launch"
    files = {path.name: _script_text(submission, fanout, path).encode(), **secret_files(submission.secrets)}
    await folders.make_folder(submission.user, submission.workdir, files)
    return path


def write_script(submission: LrmSubmission, fanout: Fanout) -> Path:
    """Write the component's script into its working directory, and return its path. Raise ``SiteError``."""
    path = submission.workdir / "launch"
    try:
        write_secrets(submission.workdir, submission.secrets)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w", encoding="utf-8") as file:
            file.write(_script_text(submission, fanout, path))
    except OSError as error:
        raise SiteUnavailable(f"cannot write {path}: {error.strerror}") from error
    return path


def _script_text(submission: LrmSubmission, fanout: Fanout, path: Path) -> str:
    """Return the shell script that starts the runners of a job on its nodes by srun, qrsh or directly."""
    parts = ["#!/bin/sh\n"]
    if submission.user:
        parts.append("unset SUDO_COMMAND SUDO_GID SUDO_UID SUDO_USER\n")  # set by sudo for the agent
    if submission.modules:
        parts.append(LOAD_MODULES.format(names=shlex.join(submission.modules)))
    for name, value in submission.environment.items():
        suffix = ':"$PATH"' if name == "PATH" else ""
        parts.append(f"export {name}={shlex.quote(value)}{suffix}\n")
    argv = shlex.join(submission.argv)
    match fanout:
        case "srun":
            shares = submission.requirement.share
            cpus = f" --cpus-per-task={submission.requirement.cores}" if shares else ""
            bind = "cores" if shares else "none"
            parts.append(SRUN_TEMPLATE.format(nodes=submission.nodes, argv=argv, bind=bind, cpus=cpus))
        case "qrsh":
            parts.append(QRSH_TEMPLATE.format(argv=argv, script=shlex.quote(shlex.quote(str(path)))))
        case "none" if submission.nodes > 1:
            raise SiteRejected(
                f"{submission.nodes} nodes requested, but with fanout none this cluster starts one runner only",
                field="size",
                value=submission.nodes,
                hint="set the cluster's fanout to srun or qrsh",
                fault=SiteFault.UNSUITABLE,
            )
        case "none":
            parts.append(f"KOALA_NODE_INDEX=0 exec {argv}\n")
    return "".join(parts)


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
