"""The script that a resource manager runs for one component, and that starts the runner on each of its nodes.

Everything the runner needs is in this file and nowhere in the resource manager's own books, which every local user may
read; so it belongs on a file system that the nodes share, readable by its owner only. Each node's secret is in a file
beside it, and only there until its runner takes it: what is in the script stands in its shell's environment, too.
"""

import asyncio
import os
import shlex
from pathlib import Path
from typing import Literal

from koalapy.agent.components.job_folders import JobFolders
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
# Through a shell, so that a program that is not there ends with 127 as everywhere. The one task of a node is its
# runner, which has all the processors of the node for what it starts: bound, as sites have it by default, but one.
# Not asked for where nothing is bound: srun would say so in each job's output.
SRUN = """\
bind=--cpu-bind=none
case "$(scontrol show config 2>/dev/null | grep '^TaskPlugin ')" in
    *affinity* | *cgroup* | '') ;;
    *) bind= ;;
esac
exec srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --mpi=none \\
    $bind --export=ALL /bin/sh -c 'exec "$@"' koala {argv}
"""
# One start for each host of the host file, which has a line for each queue that slots of it are of. The first is this
# host; the others are reached through Grid Engine itself, which ends everything with the job. There this script runs
# again: qrsh joins what it is given to one line for a shell.
QRSH = """\
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
    """Write the script where the component's account works; its path. Raises ``SiteError``."""
    if not submission.user:
        return await asyncio.to_thread(write_script, submission, fanout)
    path = submission.workdir / "launch"
    files = {path.name: _text(submission, fanout, path).encode(), **secret_files(submission.secrets)}
    await folders.make_folder(submission.user, submission.workdir, files)
    return path


def write_script(submission: LrmSubmission, fanout: Fanout) -> Path:
    """Write the component's script into its working directory; its path. Raises ``SiteError``."""
    path = submission.workdir / "launch"
    try:
        write_secrets(submission.workdir, submission.secrets)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w", encoding="utf-8") as file:
            file.write(_text(submission, fanout, path))
    except OSError as error:
        raise SiteUnavailable(f"cannot write {path}: {error.strerror}") from error
    return path


def _text(submission: LrmSubmission, fanout: Fanout, path: Path) -> str:
    parts = ["#!/bin/sh\n"]
    if submission.user:
        parts.append("unset SUDO_COMMAND SUDO_GID SUDO_UID SUDO_USER\n")  # of the agent, where it asks sudo
    if submission.modules:
        parts.append(LOAD_MODULES.format(names=shlex.join(submission.modules)))
    for name, value in submission.environment.items():
        rest = ':"$PATH"' if name == "PATH" else ""
        parts.append(f"export {name}={shlex.quote(value)}{rest}\n")
    argv = shlex.join(submission.argv)
    match fanout:
        case "srun":
            parts.append(SRUN.format(nodes=submission.nodes, argv=argv))
        case "qrsh":
            parts.append(QRSH.format(argv=argv, script=shlex.quote(shlex.quote(str(path)))))
        case "none" if submission.nodes > 1:
            raise SiteRejected(
                f"{submission.nodes} nodes, but this cluster's fanout is none: it can start one node's runner only",
                field="size",
                value=submission.nodes,
                hint="set the cluster's fanout to srun or qrsh",
                fault=SiteFault.UNSUITABLE,
            )
        case "none":
            parts.append(f"KOALA_NODE_INDEX=0 exec {argv}\n")
    return "".join(parts)
