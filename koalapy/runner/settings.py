"""What a runner is told by its environment, and why it may be unable to start a program."""

from __future__ import annotations

import os
import socket

from koalapy.runner.networks import address_in, own_addresses

NODE_VARIABLES = (
    ("LOCALD_NODE_INDEX", "LOCALD_NODE", "LOCALD_NODE_NAME"),
    ("SLURM_NODEID", "", "SLURMD_NODENAME"),
    ("KOALA_NODE_INDEX", "", "KOALA_NODE"),
)

"""Where each resource manager says which node this is: index within the component, address, name."""
JOB_VARIABLES = ("LOCALD_JOB", "SLURM_JOB_ID", "JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""Where each says which of its jobs this is; an embedded cluster may itself be in a job of another."""
PRIVATE_VARIABLES = (
    "KOALA_AGENT_FILE",
    "KOALA_SECRET_PIPE",
    "KOALA_LRM_PIPE",
    "KOALA_LEASE",
    "KOALA_SPOOL",
    "KOALA_COMPONENT_NAME",
)
AGENT_TIMEOUT = 600.0
SECRET_FILE = "secret.{node}"
"""In the component's folder, where the resource manager hands a runner nothing that others cannot read."""


class Failure(Exception):
    """The program could not be started: ``code`` when it is the user's doing, None when the infrastructure's."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class SecretGone(Exception):
    """The node's secret was taken already: another runner has its place, and is not to be troubled."""


class Settings:
    """What the agent and the resource manager told this runner through its environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.agent_file = environment["KOALA_AGENT_FILE"]
        self.token = environment["KOALA_COMPONENT_TOKEN"]
        self.component_name = environment.get("KOALA_COMPONENT_NAME", self.token)
        lease = environment.get("KOALA_LEASE", "none")
        self.lease = None if lease == "none" else float(lease)
        """Seconds of the daemon's silence after which the program is ended; None: never for that reason."""
        self.spool = environment["KOALA_SPOOL"]
        self.stage = environment.get("KOALA_STAGE", "")
        """The folder of the program's files on this cluster, if it has one."""
        index, host, name = next((v for v in NODE_VARIABLES if v[0] in environment), NODE_VARIABLES[-1])
        self.node = int(environment.get(index, "0"))
        self.name = environment.get(name) or socket.gethostname()
        self.host = environment.get(host, "")
        """Address of this node for the others of its gang; empty: the one by which it reaches its agent."""
        self.secret = self._take_secret(environment.get("KOALA_SECRET_PIPE"))
        self.lrm_pipe = int(environment.get("KOALA_LRM_PIPE", "-1"))
        """A pipe that ends when the resource manager that started this runner does; -1: it has none."""
        if self.lrm_pipe >= 0:
            os.set_inheritable(self.lrm_pipe, False)
        self.problem = ""
        """Why this node is of no use, if it is not."""
        if network := environment.get("KOALA_MPI_INTERFACE"):
            self._look_for(network, environment.get("KOALA_CLUSTER", "NAME"))
        self.lrm_job = next((environment[v] for v in JOB_VARIABLES if environment.get(v)), "")
        self.base = {k: v for k, v in environment.items() if k not in PRIVATE_VARIABLES}

    @property
    def agent_timeout(self) -> float:
        """Seconds for which an agent that says nothing, or another node, is waited for."""
        return AGENT_TIMEOUT if self.lease is None else min(self.lease, AGENT_TIMEOUT)

    def _take_secret(self, pipe: str | None) -> bytes:
        """This node's own, which nobody finds afterwards; ``SecretGone``."""
        path = f"{self.spool}/{SECRET_FILE.format(node=self.node)}"
        try:
            file = int(pipe) if pipe else os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(file, "rb") as source:
                secret = bytes.fromhex(source.read(1000).decode("ascii"))
            if not pipe:
                os.unlink(path)  # of several runners that have read it one succeeds
        except (OSError, ValueError) as error:
            raise SecretGone(f"node {self.node} of {self.token} has no secret left here: {error}") from error
        if not secret:
            raise SecretGone(f"node {self.node} of {self.token} was handed no secret")
        return secret

    def _look_for(self, network: str, cluster: str) -> None:
        """Take this node's address in a network. Embedded nodes share a host: each has the one it was given."""
        addresses = [("lo", self.host)] if self.host else own_addresses()
        found = address_in(network, addresses)
        if found is None:
            has = ", ".join(f"{address} on {interface}" for interface, address in addresses)
            what = f"address in {network}" if "/" in network else f"interface {network} with an address"
            self.problem = f"node {self.name} has no {what} (it has {has}): correct clusters.{cluster}.mpi.interface"
        self.host = found or self.host
