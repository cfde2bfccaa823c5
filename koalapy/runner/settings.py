"""Read the settings of a runner from its environment, and define its errors."""

from __future__ import annotations

import os
import socket

from koalapy.runner.networks import find_address, own_addresses

NODE_VARIABLES = (
    ("LOCALD_NODE_INDEX", "LOCALD_NODE", "LOCALD_NODE_NAME"),
    ("SLURM_NODEID", "", "SLURMD_NODENAME"),
    ("KOALA_NODE_INDEX", "", "KOALA_NODE"),
)
"""Variables by which each resource manager names this node: index within the component, address, name."""
JOB_VARIABLES = ("LOCALD_JOB", "SLURM_JOB_ID", "JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""Variables with the resource manager's job, innermost first: an embedded cluster may run in a job of another."""
PRIVATE_VARIABLES = (
    "KOALA_AGENT_FILE",
    "KOALA_SECRET_PIPE",
    "KOALA_LRM_PIPE",
    "KOALA_LEASE",
    "KOALA_SPOOL",
    "KOALA_COMPONENT_NAME",
)
"""Variables that the program does not inherit."""
AGENT_TIMEOUT_S = 600.0
RELAY_LOSS_GRACE = 1.0
"""Seconds in which a program that has lost its relay may end with 0: it may need no more messages."""
SECRET_FILE = "secret.{node}"
"""Name in the component's folder, where the resource manager can hand a runner nothing that others cannot read."""


class Failure(Exception):
    """The program cannot be started. ``code``: its exit code if the user is at fault, None for the infrastructure."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class SecretGone(Exception):
    """The node's secret was taken already: another runner serves this node and must not be disturbed."""


class Settings:
    """Settings that the agent and the resource manager give a runner by its environment. Raise ``SecretGone``."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.agent_file = environment["KOALA_AGENT_FILE"]
        self.token = environment["KOALA_COMPONENT_TOKEN"]
        self.component_name = environment.get("KOALA_COMPONENT_NAME", self.token)
        lease = environment.get("KOALA_LEASE", "none")
        self.lease = None if lease == "none" else float(lease)
        """Seconds of the daemon's silence after which the program is ended; None: silence does not end it."""
        self.spool = environment["KOALA_SPOOL"]
        self.stage = environment.get("KOALA_STAGE", "")
        """The folder of the program's files on this cluster, if it has one."""
        index, host, name = next((v for v in NODE_VARIABLES if v[0] in environment), NODE_VARIABLES[-1])
        self.node = int(environment.get(index, "0"))
        self.name = environment.get(name) or socket.gethostname()
        self.shares_processors = host == "LOCALD_NODE"
        """Whether other nodes of the cluster are on the same machine: it is embedded."""
        self.host = environment.get(host, "")
        """Address of this node for the job's other nodes; empty: its address on the connection to its agent."""
        self.secret = self._take_secret(environment.get("KOALA_SECRET_PIPE"))
        self.lrm_pipe = int(environment.get("KOALA_LRM_PIPE", "-1"))
        """A pipe that closes when the resource manager that started this runner ends; -1: none."""
        if self.lrm_pipe >= 0:
            os.set_inheritable(self.lrm_pipe, False)
        self.problem = ""
        """The reason why this node cannot be used; empty if it can."""
        if network := environment.get("KOALA_MPI_INTERFACE"):
            # Embedded nodes share a host: each has the address it was given.
            addresses = [("lo", self.host)] if self.host else own_addresses()
            address = find_address(network, addresses)
            if address is None:
                available = ", ".join(f"{address} on {interface}" for interface, address in addresses)
                missing = f"address in {network}" if "/" in network else f"interface {network} with an address"
                section = f"clusters.{environment.get('KOALA_CLUSTER', 'NAME')}.mpi"
                self.problem = f"node {self.name} has no {missing} (it has {available}): correct {section}.interface"
            self.host = address or self.host
        self.lrm_job = next((environment[v] for v in JOB_VARIABLES if environment.get(v)), "")
        self.program_environment = {k: v for k, v in environment.items() if k not in PRIVATE_VARIABLES}

    @property
    def agent_timeout(self) -> float:
        """Seconds to wait for a silent agent or another node."""
        return AGENT_TIMEOUT_S if self.lease is None else min(self.lease, AGENT_TIMEOUT_S)

    def _take_secret(self, pipe: str | None) -> bytes:
        """Read the node's secret and remove it, so that no later process finds it."""
        path = f"{self.spool}/{SECRET_FILE.format(node=self.node)}"
        try:
            file = int(pipe) if pipe else os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(file, "rb") as source:
                secret = bytes.fromhex(source.read(1000).decode("ascii"))
            if not pipe:
                os.unlink(path)  # if several runners have read the file, only one succeeds
        except (OSError, ValueError) as error:
            raise SecretGone(f"node {self.node} of {self.token} has no secret left here: {error}") from error
        if not secret:
            raise SecretGone(f"node {self.node} of {self.token} received an empty secret")
        return secret
