"""What an agent is told: the parts of its cluster's configuration that it goes by, and where its daemon is."""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo

import koalapy
from koalapy.agent.lrm.node_classes import NodeClassSettings
from koalapy.agent.lrm.port import KINDS, LrmKind
from koalapy.model.disk import DiskLimits
from koalapy.system.tls import Trust

RUNNER = Path(koalapy.__file__).parent / "runner" / "runner.py"
"""The program that runs on the nodes; give it to a local cluster as its ``preload``."""

NO_SOCKET = "none"


def _known_kind(kind: str) -> str:
    if kind not in KINDS:
        *others, last = map(repr, KINDS)
        raise ValueError(f"Input should be {', '.join(others)} or {last}")
    return kind


def _embedded_only(probability: float, info: ValidationInfo) -> float:
    if probability and not ((kind := info.data.get("kind")) in KINDS and KINDS[kind].on_this_host):
        raise ValueError("only clusters of the kind local fail on purpose")
    return probability


def _loopback_network(network: str) -> str:
    """Return three bytes in their shortest form. ``ValueError`` for anything else."""
    if not re.fullmatch(r"127(\.\d{1,3}){2}", network) or any(int(byte) > 255 for byte in network.split(".")):
        raise ValueError(f"{network!r} is not the first three bytes of a loopback address: give one as 127.0.9")
    return ".".join(str(int(byte)) for byte in network.split("."))


def _socket_path(path: str) -> str:
    if path != NO_SOCKET and not path.startswith("/"):
        raise ValueError(f"{path} is not an absolute path: give one, or {NO_SOCKET}")
    return path


NodeClassName = Annotated[str, StringConstraints(pattern=r"^[\w.+-]{1,100}$")]


@dataclass(frozen=True, kw_only=True)
class SiteSettings:
    """What the configuration says of a cluster, under ``clusters.NAME``, that its agent takes as it is."""

    kind: Annotated[str, AfterValidator(_known_kind)] = "local"
    """Its resource manager: ``slurm``, ``sge``, ``drmaa``, or ``local`` for nodes of this machine."""
    nodes: Annotated[int, Field(ge=1, le=254)] = 4
    """Of the kinds ``local`` and ``drmaa``; the others are asked how many they have."""
    network: Annotated[str, AfterValidator(_loopback_network)] | None = None
    """First three bytes of the nodes' loopback addresses, which no other cluster has; by default 127.0.K for the K-th
    cluster, or the first that is free."""
    start_failures: Annotated[float, Field(ge=0, le=1), AfterValidator(_embedded_only)] = 0.0
    """To try out fault tolerance, of the kind ``local`` only: the probability that the start of a component fails.

    While there is a file ``lrm/start-failures`` in the cluster's directory, the number in it counts instead.
    """

    identity: Literal["own", "service", "mapped"] = "service"
    """Whose processes jobs are: of the one person whose account the agent runs in, of an account for all, or each of
    its owner's own account."""
    min_uid: Annotated[int, Field(ge=1)] = 1000
    """Of the identity ``mapped``: the least number of an account that is a person's; none below gets a job."""

    # How to ask its resource manager
    partition: str | None = None
    """Slurm: by default the default partition; or several, with commas between."""
    account: str | None = None
    """To be charged; by default the user's own."""
    queue: str | None = None
    """Grid Engine: by default any queue that the parallel environment may use."""
    parallel_environment: str = "koala"
    """Grid Engine: with whole nodes as its unit, and ``control_slaves TRUE``."""
    library: str | None = None
    """Path of the DRMAA library; Slurm is driven by its commands when there is none."""
    native_specification: str = ""
    """Further options for every job, as sbatch, qsub or the DRMAA library take them.

    Of the kind ``drmaa``, ``{nodes}`` and ``{walltime}`` stand for a job's: in seconds, or as Slurm has it where its
    ``srun`` starts the runners.
    """
    fanout: Literal["srun", "qrsh", "none"] | None = None
    """What starts the runner on each allocated node; by default what the kind has."""
    poll_interval: Annotated[float, Field(ge=1.0)] = 5.0
    """Seconds between two questions to an LRM that cannot tell of changes by itself."""

    modules: list[str] = field(default_factory=list)
    """Environment modules loaded before every program."""
    login_socket: Annotated[str, AfterValidator(_socket_path)] | None = None
    """Where users of the head node find the agent (``koala login``), or ``none``; by default
    ``/run/koala/CLUSTER.sock`` where the agent may listen, else ``login.sock`` in its directory. One that the daemon
    starts itself has none by default."""
    transfer_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """At which other sites' head nodes reach this one to pull files; by default any free one."""
    transfer_limit: Annotated[int, Field(ge=1, le=64)] = 4
    """How many files and folders are pulled from other sites at once; further ones wait for their turn."""
    node_classes: dict[NodeClassName, NodeClassSettings] = field(default_factory=dict)
    """Which of its nodes are alike, and what they are, where its resource manager does not say it."""
    forget_after: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 14 * 86400.0
    """Seconds after which the agent removes what is left of a daemon that is not heard of any more, while there is
    another: stages and ended components, as after the database was wiped."""

    @property
    def lrm(self) -> LrmKind:
        return KINDS[self.kind]


@dataclass(frozen=True)
class AgentSettings(SiteSettings):
    """Where an agent finds its daemon, and what its runners need."""

    cluster: str
    url: str
    """``http://host:port`` of the daemon, or ``https://``."""
    token: str
    directory: Path
    """Holds what must survive a restart; best on a file system that the nodes share."""
    runner_host: str = "127.0.0.1"
    """Address on which to listen for runners."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to every runner's environment, and so to every program's."""
    python: str = sys.executable
    replica_directories: Sequence[Path] = ()
    """Folders below which replicas may lie."""
    stage_directory: Path | None = None
    """Where components get folders of their own, which the nodes must see; by default beside ``directory``."""
    transfer_address: str = "127.0.0.1"
    """Address by which other sites' agents reach this one, to pull files."""
    disks: DiskLimits = field(default_factory=DiskLimits)
    login_sockets: Sequence[Path] = ()
    """Where to listen for the users of this host: the first of these where that may be."""
    trust: Trust = field(default_factory=Trust)
    """By which the daemon is known, where it speaks TLS."""
    encrypt_transfers: bool = True
    encrypted_links: Mapping[str, bool] = field(default_factory=dict)
    """By the other cluster, where it is not as with all."""

    def requires_encryption(self, cluster: str) -> bool:
        """Whether nothing may go in clear between this cluster and another."""
        return self.encrypted_links.get(cluster, self.encrypt_transfers)

    @property
    def stages(self) -> Path:
        """Where stages are made ready, and used too unless jobs run as several accounts."""
        shared = None if self.identity == "mapped" else self.stage_directory
        return shared or self.directory.with_name(f"{self.directory.name}-stages")

    @property
    def accounts_directory(self) -> Path | None:
        """Where each account has the folders of its jobs; None where they are all the agent's own."""
        return self.stage_directory if self.identity == "mapped" else None

    @property
    def address_file(self) -> Path:
        """Tells runners where their agent is."""
        return (self.accounts_directory or self.directory) / "agent.json"

    @property
    def endpoint(self) -> str:
        scheme, _, rest = self.url.rstrip("/").partition("://")
        return f"{scheme.replace('http', 'ws', 1)}://{rest}/api/v1/agents/{self.cluster}/connect"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTimeouts:
    """All values are in seconds."""

    # Resource manager
    lrm_silence_s: float = 10.0
    """Duration of a poll after which the daemon is told that the resource manager does not answer."""
    report_interval_s: float = 10.0
    """Time between two reports of an unchanged cluster."""
    submit_pause_s: float = 0.2
    """Base of the pauses between two tries to submit a job: each pause is twice as long as the one before."""
    runner_connect_s: float = 60.0
    """Time that runners have to connect once the resource manager says that they run."""
    expiry_check_s: float = 3600.0
    """Time between two searches for what is left of daemons that are not heard of any more."""

    # Files
    transfer_retry_s: float = 0.5
    """First pause after a transfer was cut; each further pause is twice as long."""
    max_transfer_retry_s: float = 16.0
    """Longest pause between two tries of a transfer."""
    transfer_login_s: float = 30.0
    """Time that a puller has to begin, to show its ticket, and to be let in."""
    account_stall_s: float = 30.0
    """Time without a byte after which a process that handles files as another account counts as stuck."""
    sweep_interval_s: float = 60.0
    """Time between two searches for folders of killed runners."""

    # Check of a head node
    trial_node_s: float = 30.0
    """Time that a node may take to become free and to run the trial job."""
    trial_output_s: float = 3.0
    """Time after the trial job's end in which its output may come through a shared file system."""
    trial_poll_s: float = 0.5
    """Pause between two looks at the trial job."""


DEFAULT_TIMEOUTS = AgentTimeouts()


PROGRAM_VARIABLES = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "LD_LIBRARY_PATH",
        "MODULEPATH",
        "MODULESHOME",
    }
)
"""By every program on a cluster, and ``LC_`` with its categories; what a cluster's programs need besides is set in the
cluster's ``environment``."""
OPEN_MPI_PREFIXES = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")
"""How the parameters of Open MPI begin: programs on embedded clusters have them as the daemon does."""
LRM_VARIABLES = frozenset({"PYTHONPATH", "SLURM_CONF", "GLIBC_TUNABLES"})
LRM_PREFIXES = ("DRMAA_", "LSF_", "PBS_", "SGE_")
"""What the commands and libraries of resource managers go by."""


def inherited_environment(names: Iterable[str] = (), prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """What programs inherit, and what is named besides."""
    kept, begin = PROGRAM_VARIABLES.union(names), ("LC_", *prefixes)
    return {name: value for name, value in os.environ.items() if name in kept or name.startswith(begin)}


def agent_environment() -> dict[str, str]:
    """The environment of an agent that the daemon starts."""
    return inherited_environment(LRM_VARIABLES, (*OPEN_MPI_PREFIXES, *LRM_PREFIXES))
