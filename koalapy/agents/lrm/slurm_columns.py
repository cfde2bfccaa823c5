"""Reads squeue's answer in columns of fixed width: for clusters whose whole queue as JSON would be too much. Pure."""

import os

from koalapy.agents.lrm.slurm_hostlist import expand
from koalapy.agents.lrm.slurm_json import SlurmJob, wait_status, words_in
from koalapy.model.errors import SiteUnavailable

_WIDTHS = {"Name": 256, "JobID": 24, "State": 32, "exit_code": 16, "NumNodes": 16, "Reason": 96, "NodeList": 8192}
COLUMNS = "--Format=" + ",".join(f"{name}:{width}" for name, width in _WIDTHS.items())


def read_columns(answer: bytes, prefix: str) -> list[SlurmJob]:
    """Jobs of our own user whose names begin with ``prefix``; ``SiteUnavailable`` for what is no answer to that."""
    return [_job(line) for line in answer.decode(errors="replace").splitlines() if line.startswith(prefix)]


def _job(line: str) -> SlurmJob:
    values, at = [], 0
    for width in _WIDTHS.values():
        values.append(line[at : at + width].strip())
        at += width
    name, id, state, status, wants, reason, nodes = values
    try:
        code, signal = wait_status(int(status))
        hosts = tuple(expand(nodes))
        if not id.isdecimal() or not state:
            raise ValueError(line)
    except ValueError:
        raise SiteUnavailable(f"squeue answered what cannot be understood: {' '.join(line.split())[:80]}") from None
    # Of a job that may have more or fewer nodes it is a range.
    least = wants.partition("-")[0]
    return SlurmJob(
        id, name, os.getuid(), words_in([state]), hosts, code, signal, reason, int(least) if least.isdecimal() else 0
    )
