"""The parameters of an MPI daemon that the head node may choose: only these come from another site, as typed fields."""

from __future__ import annotations

import re
import shlex

from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

DAEMON = re.compile(r"(?:^|(?<=[\s;]))(?:[^\s;]*/)?(?:prted|orted)(?=\s|$)")
OPTIONS = ("--prtemca", "-prtemca", "--mca", "-mca")
MAX_DAEMONS = 1_000_000
MAX_LENGTH = 64 * 1024
"""Characters of a value. The names of all nodes of a large job are the longest."""
_NUMBER = r"\d{1,10}"
_JOB = r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,199}"
_ADDRESSES = r"(?:;tcp6?://[0-9A-Za-z\[\]:.,%-]{1,8000}){1,4}"
REQUIRED = {
    5: {
        "ess_base_nspace": _JOB,
        "ess_base_vpid": _NUMBER,
        "ess_base_num_procs": _NUMBER,
        "prte_hnp_uri": rf"{_JOB}\.{_NUMBER}{_ADDRESSES}",
    },
    4: {
        "ess_base_jobid": _NUMBER,
        "ess_base_vpid": _NUMBER,
        "ess_base_num_procs": _NUMBER,
        "orte_hnp_uri": rf"{_NUMBER}\.{_NUMBER}{_ADDRESSES}",
        "orte_node_regex": r"[A-Za-z0-9_][A-Za-z0-9_.:,@()\[\]-]{0,65535}",
    },
}
"""By series: which daemon it is, of how many, and the addresses of ``mpirun``."""
SHARED = {
    5: {"rml_base_radix": _NUMBER, "routed_radix": _NUMBER},
    4: {"routed": "binomial|debruijn|direct|radix", "routed_radix": _NUMBER},
}
"""By series: how daemons route messages, which must be the same in all of them."""


def select_parameters(series: int, command: str) -> dict[str, str]:
    """Return the parameters that another node's daemon needs, from the shell command that ``mpirun`` wants run there.

    Leave out all others: each node has its own. Raise ``Failure`` if the command starts no MPI daemon.
    """
    daemon = DAEMON.search(command)
    if daemon is None:
        raise Failure(f"mpirun asks for something that is not its daemon: {command[:200]}")
    try:
        words = shlex.split(command[daemon.end() :])
    except ValueError as error:
        raise Failure(f"mpirun's command for its daemon cannot be read ({error}): {command[:200]}") from error
    allowed = REQUIRED[series].keys() | SHARED[series].keys()
    named = {n: value for option, n, value in zip(words, words[1:], words[2:]) if option in OPTIONS and n in allowed}
    return {name: value.replace("\\", "") for name, value in named.items()}


def check_parameters(series: int, parameters: object, section: str) -> Mapping[str, str]:
    """Return the parameters of a launch request from another node if each is allowed and has a valid value.

    ``section`` is the setting that holds this site's own parameters. Raise ``Failure`` naming the parameter otherwise.
    """
    if not isinstance(parameters, dict):
        raise Failure("the job's head node sent a launch request without parameters: it needs the same koalapy")
    patterns = {**REQUIRED[series], **SHARED[series]}
    for name, value in parameters.items():
        if name not in patterns:
            raise Failure(
                f"the job's head node may not set the parameter {_shorten(name)} of this node's MPI daemon: "
                f"leave it out there, or set it here in {section}.parameters"
            )
        if not isinstance(value, str) or len(value) > MAX_LENGTH or not re.fullmatch(patterns[name], value, re.ASCII):
            raise Failure(
                f"the job's head node sent {_shorten(value)} as the parameter {name}, which is no value of it"
            )
    for name in REQUIRED[series]:
        if name not in parameters:
            raise Failure(f"the job's head node sent no parameter {name} for this node's MPI daemon")
    if not 0 < int(parameters["ess_base_vpid"]) < int(parameters["ess_base_num_procs"]) <= MAX_DAEMONS:
        raise Failure(
            f"the job's head node numbers this node's MPI daemon {parameters['ess_base_vpid']} "
            f"of {parameters['ess_base_num_procs']}, which cannot be"
        )
    return parameters


def _shorten(value: object) -> str:
    return ascii(value)[:100]
