"""Serves replicas to other sites by rsync daemons, one per connection, limited to the ticket's files.

Every transfer is encrypted, by a tunnel at each side: ``tunnel.py`` is its program.
"""

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import structlog
from pydantic import BaseModel, Field

from koalapy.agent.accounts import drop_capabilities
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentSettings, AgentTimeouts
from koalapy.agent.runners.uplink import ASKER
from koalapy.agent.transfers.replicas import ReplicaRequest, Replicas, Seals
from koalapy.agent.transfers.roots import Roots
from koalapy.agent.transfers.tunnel import CERTIFICATE, HOST, LIFELINE, PORT
from koalapy.model.errors import SiteFault, SiteRejected
from koalapy.runner.folders import replace_file
from koalapy.system.event_loop import TLS_FIRST_BYTE, BackgroundTasks, peek_first_byte

log = structlog.get_logger()

Key = TypeVar("Key")

TUNNEL = str(Path(__file__).with_name("tunnel.py"))
_PYTHON = [sys.executable, "-I", "-S"]
"""Without site packages, since their import would take most of the time of a short transfer."""
_LIFETIME = timedelta(days=3650)
"""Validity for form only: the puller pins the certificate, and forgets it after the transfer."""
RSYNC = "rsync"
USER = "koala"
TICKET_LIFETIME = 24 * 3600.0
"""Seconds until a ticket expires; the puller usually returns it before."""
MAX_TICKETS = 256
"""Maximum tickets; beyond it the oldest one of the site with most tickets is revoked. A running transfer does not need
its ticket."""
MAX_CONNECTIONS = 64
"""Connections with an rsync daemon."""
MAX_SILENT = 256
"""Other connections. Beyond it the oldest one of the address with most of them is closed."""
LOG = "rsync.log"
MAX_LOG_SIZE = 10_000_000
"""Maximum bytes."""
IO_TIMEOUT = 60
"""Seconds without a byte after which a connection is closed."""
MAX_CERTIFICATE_LENGTH = 4096
"""Maximum characters."""
CONFIGURATION = "rsyncd.conf"
HEADER = """\
use chroot = no
munge symlinks = no
numeric ids = yes
read only = yes
list = no
reverse lookup = no
refuse options = copy-links copy-dirlinks copy-unsafe-links
transfer logging = no
timeout = {silence}
log file = {log}
"""
MODULE = """
[{module}]
path = {path}
auth users = {user}
secrets file = {secrets}
"""
ONLY = """\
include = /{pattern}
exclude = *
"""


class TransferIdentity:
    """A self-signed certificate of this agent run, sent to pullers along with their tickets."""

    def __init__(self) -> None:
        """Create key and certificate, which takes some milliseconds. Raise ``OSError``."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
        from cryptography.x509.oid import NameOID

        key, now = generate_private_key(SECP256R1()), datetime.now(UTC)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "koala transfers")])
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        signed = builder.not_valid_before(now - _LIFETIME).not_valid_after(now + _LIFETIME).sign(key, hashes.SHA256())
        certificate = signed.public_bytes(Encoding.PEM)
        self.certificate = certificate.decode()
        # In memory only; tunnels inherit the descriptor.
        self._memory = os.memfd_create("transfers", os.MFD_CLOEXEC)
        with open(os.dup(self._memory), "wb") as file:
            file.write(certificate + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    def close(self) -> None:
        os.close(self._memory)

    async def start_tunnel(
        self, connection: socket.socket, rsync: socket.socket, timeout: float
    ) -> asyncio.subprocess.Process:
        """Start a tunnel from an encrypted connection to a plain socket. Close it without TLS in time. Raise
        ``OSError``."""
        return await asyncio.create_subprocess_exec(
            *drop_capabilities(*_PYTHON, TUNNEL, "serve", str(rsync.fileno()), str(self._memory), str(timeout)),
            cwd="/",
            stdin=connection.fileno(),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=[rsync.fileno(), self._memory],
            start_new_session=True,
            env={"LC_ALL": "C"},
        )


def tunnel_environment(host: str, port: int, certificate: str, lifeline: int) -> dict[str, str]:
    """Return variables that make rsync connect to a source through a tunnel, which ends when the other end of the pipe
    ``lifeline`` is closed."""
    command = shlex.join([*_PYTHON, TUNNEL, "connect"]).replace("%", "%%")
    address = {HOST: host, PORT: str(port), CERTIFICATE: certificate}
    return {"RSYNC_CONNECT_PROG": command, **address, LIFELINE: str(lifeline)}


def missing_programs() -> list[str]:
    """Return the programs that transfers need and this host lacks."""
    return [] if shutil.which(RSYNC) else [RSYNC]


class Route(BaseModel):
    """The answer to ``export``: how one puller gets the files of its ticket."""

    host: str = Field(pattern=r"^[A-Za-z0-9._:-]+$")
    port: int = Field(gt=0, lt=65536)
    module: str = Field(pattern=r"^[0-9a-f]+$")
    user: str = Field(pattern=r"^[a-z]+$")
    password: str = Field(pattern=r"^[0-9A-Za-z]*$", max_length=200)
    kind: Literal["file", "folder"]
    certificate: str = Field(max_length=MAX_CERTIFICATE_LENGTH, pattern=r"^[\t\n\r -~]+$")
    """Certificate to expect, in PEM."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The permission to read a folder, or one entry of it, as an rsync module with a random name."""

    module: str
    site: str
    """The cluster that asked for it."""
    password: str
    folder: int
    """Descriptor of the folder, which remains valid if its path changes."""
    entry: str | None
    alarm: asyncio.TimerHandle


class Exports:
    """Answers the questions ``export`` and ``unexport``, and serves pullers with a ticket."""

    def __init__(
        self,
        replicas: Replicas,
        directory: Path,
        address: str,
        port: int | None,
        timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
        *,
        max_tickets: int = MAX_TICKETS,
        max_log_size: int = MAX_LOG_SIZE,
    ) -> None:
        """Set up. ``directory`` holds rsync's configuration; ``address`` is where other sites reach this one."""
        self._login_s = timeouts.transfer_login_s
        self._max_tickets, self._max_log_size = max_tickets, max_log_size
        self._identity: TransferIdentity | None = None
        self.replicas, self._directory = replicas, directory
        self._address, self._port = address, port or 0
        self._tickets: dict[str, Ticket] = {}
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.subprocess.Process] = set()
        """The running rsync daemons."""
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        self._silent: dict[asyncio.Task[Any], str] = {}
        """Tasks of connections without a place and their peers' addresses, in the order of their arrival."""
        self._serving = BackgroundTasks()

    @classmethod
    def from_settings(cls, settings: AgentSettings, timeouts: AgentTimeouts) -> Self:
        """Return the exports of a cluster's replicas."""
        replicas = Replicas(
            Roots(settings.cluster, settings.replica_directories), Seals(settings.directory / "seals.json")
        )
        directory = settings.directory / "exports"
        return cls(replicas, directory, settings.transfer_address, settings.transfer_port, timeouts)

    async def export_replica(self, payload: Mapping[str, Any]) -> dict[str, object]:
        """Check a replica and issue a ticket; return the route. Raise ``SiteError``."""
        request, asker = ReplicaRequest.model_validate(payload), str(payload.get(ASKER, ""))
        if shutil.which(RSYNC) is None:
            raise SiteRejected("rsync is missing on its head node: install it there", fault=SiteFault.NO_RSYNC)
        path = await asyncio.to_thread(self.replicas.check_replica, request)
        folder, entry = await asyncio.to_thread(self._open, path)
        try:
            self._listen()
        except SiteRejected:
            os.close(folder)
            raise
        if len(self._tickets) >= self._max_tickets:
            self._revoke(_oldest_of_busiest({module: ticket.site for module, ticket in self._tickets.items()}))
        module = secrets.token_hex(8)
        alarm = asyncio.get_running_loop().call_later(TICKET_LIFETIME, self._revoke, module)
        ticket = Ticket(module, asker, secrets.token_hex(16), folder, entry, alarm)
        self._tickets[module] = ticket
        try:
            if self._identity is None:
                self._identity = await asyncio.to_thread(TransferIdentity)
            self._write()
        except OSError:
            self._end(ticket.module)
            raise
        assert self._listening is not None
        return Route(
            host=self._address,
            port=self._listening.getsockname()[1],
            module=ticket.module,
            user=USER,
            password=ticket.password,
            kind="folder" if ticket.entry is None else "file",
            certificate=self._identity.certificate,
        ).model_dump()

    async def revoke_ticket(self, payload: Mapping[str, Any]) -> dict[str, object]:
        """Revoke a ticket of the asking cluster."""
        module = str(payload.get("module", ""))
        if module in self._tickets and self._tickets[module].site == str(payload.get(ASKER, "")):
            self._revoke(module)
        return {}

    async def close(self) -> None:
        """Stop serving, kill all running rsync processes, and remove the tickets and configuration files."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()
        self._serving.cancel()
        await self._serving.wait()
        for process in self._connections:
            kill_group(process)
        await asyncio.gather(*(process.wait() for process in self._connections))
        if self._identity is not None:
            self._identity.close()
            self._identity = None
        for module in list(self._tickets):
            self._end(module)
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def _open(self, path: Path) -> tuple[int, str | None]:
        """Return a descriptor of the folder to serve, and the only entry to serve, if any."""
        with self.replicas.roots.open_path(path) as opened:
            only = None if opened.is_folder else opened.name
            return os.dup(opened.parent if only else opened.descriptor), only

    def _revoke(self, module: str) -> None:
        """End a ticket and remove it from rsync's configuration. Ignore an unknown one. Raise ``OSError``."""
        if module in self._tickets:
            self._end(module)
            self._write()

    def _end(self, module: str) -> None:
        """End a ticket, even if the configuration cannot be rewritten: remove its secret and close its folder."""
        ticket = self._tickets.pop(module)
        ticket.alarm.cancel()
        if any(not _has_begun(process.pid) for process in self._connections):
            # It may have accepted this ticket, and would serve whatever gets the descriptor's number next.
            asyncio.get_running_loop().call_later(self._login_s, os.close, ticket.folder)
        else:
            os.close(ticket.folder)
        with contextlib.suppress(OSError):
            self._secrets(module).unlink()

    # rsync's configuration, which it reads anew for every connection

    def _secrets(self, module: str) -> Path:
        return self._directory / f"{module}.secret"

    def _write(self) -> None:
        """Write the configuration files of rsync, with one module and one secret for each ticket."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        log_file = self._directory / LOG
        with contextlib.suppress(FileNotFoundError):
            if log_file.stat().st_size > self._max_log_size:
                log_file.unlink()
        header = HEADER.format(silence=IO_TIMEOUT, log=log_file)
        if os.geteuid() == 0:
            # By default rsync changes to another user, which cannot read all replicas.
            header += "uid = 0\ngid = 0\n"
        text = header
        for ticket in self._tickets.values():
            secret = self._secrets(ticket.module)
            if not secret.exists():
                secret.touch(mode=0o600)
                secret.write_text(f"{USER}:{ticket.password}\n")
            path = f"/proc/self/fd/{ticket.folder}"  # of rsync itself, which inherits the descriptor
            text += MODULE.format(module=ticket.module, path=path, user=USER, secrets=secret)
            if ticket.entry is not None:
                text += ONLY.format(pattern=filter_pattern(ticket.entry))
        replace_file(self._directory / CONFIGURATION, text.encode(), sync=False)

    # Connections

    def _listen(self) -> None:
        """Open the listening socket and start to accept connections, unless both have happened before."""
        if self._listening is not None:
            return
        try:
            self._listening = _listener(self._address, self._port)
        except OSError as error:
            address = f"{self._address or '*'}:{self._port or '*'}"
            raise SiteRejected(
                f"cannot listen on {address} for transfers: {error.strerror}", fault=SiteFault.ADDRESS
            ) from error
        shutil.rmtree(self._directory, ignore_errors=True)  # of an agent that was killed
        self._accepting = asyncio.create_task(self._accept(self._listening))
        log.info("serving files", action="files-served", address=self._address, port=self._listening.getsockname()[1])

    async def _accept(self, listening: socket.socket) -> None:
        """Serve each accepted connection in a task, until cancelled. Close old silent ones if there are too many."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (address, *_) = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("cannot accept a transfer", action="transfer-not-accepted", reason=str(error))
                await asyncio.sleep(1.0)
                continue
            if len(self._silent) >= MAX_SILENT:
                oldest = _oldest_of_busiest(self._silent)
                del self._silent[oldest]
                oldest.cancel()  # also while it waits for a place
            self._silent[self._serving.spawn(self._serve(connection))] = address

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one puller once it begins TLS, and one of ``MAX_CONNECTIONS`` places is free."""
        with connection:
            try:
                async with asyncio.timeout(self._login_s):
                    if await peek_first_byte(connection) != TLS_FIRST_BYTE:
                        return
                    await self._places.acquire()
            except (TimeoutError, OSError):
                return
            finally:
                self._silent.pop(cast("asyncio.Task[Any]", asyncio.current_task()), None)
            try:
                await self._run_rsync(connection)
            finally:
                self._places.release()

    async def _run_rsync(self, connection: socket.socket) -> None:
        """Serve one puller with an rsync daemon, which reads the present configuration. Close our end."""
        with contextlib.ExitStack() as ours:
            ours.enter_context(connection)
            try:
                connection.setblocking(True)
                if self._identity is None:
                    return
                rsync_end, tunnel_end = map(ours.enter_context, socket.socketpair())
                rsync = await self._start_rsync(rsync_end)
                tunnel = await self._identity.start_tunnel(connection, tunnel_end, self._login_s)
            except OSError as error:
                log.warning("cannot run rsync", action="rsync-failed", reason=str(error))
                return
        for process in (rsync, tunnel):
            await self._await_end(process)

    async def _start_rsync(self, connection: socket.socket) -> asyncio.subprocess.Process:
        """Start an rsync daemon on a socket. Raise ``OSError``."""
        process = await asyncio.create_subprocess_exec(
            *drop_capabilities(RSYNC, "--daemon", f"--config={self._directory / CONFIGURATION}"),
            cwd="/",
            stdin=connection.fileno(),
            stdout=connection.fileno(),
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=[ticket.folder for ticket in self._tickets.values()],
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
        )
        self._connections.add(process)
        return process

    async def _await_end(self, process: asyncio.subprocess.Process) -> None:
        """Wait for an rsync daemon; kill it if its puller does not log in in time."""
        try:
            async with asyncio.timeout(self._login_s):
                await process.wait()
        except TimeoutError:
            if process in self._connections and not _has_begun(process.pid):
                kill_group(process)
            await process.wait()
        self._connections.discard(process)


def _oldest_of_busiest(owners: Mapping[Key, str]) -> Key:
    """Return the first key of the owner with most keys; ``owners``: the owner of each key, in the order of arrival."""
    ((busiest, _),) = Counter(owners.values()).most_common(1)
    return next(key for key, owner in owners.items() if owner == busiest)


def kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill a process and all processes of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _has_begun(pid: int) -> bool:
    """Return whether an rsync daemon has accepted its puller: it then changes to the module's folder."""
    try:
        return os.readlink(f"/proc/{pid}/cwd") != "/"
    except OSError:
        return False


def filter_pattern(name: str) -> str:
    """Return an rsync filter pattern for a name, with ``?`` in place of special characters."""
    return re.sub(rb"[^A-Za-z0-9._-]", b"?", os.fsencode(name)).decode()


def _listener(address: str, port: int) -> socket.socket:
    """Listen on the address if it belongs to this host, else on all: other sites may use a translated one."""
    try:
        info = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(info[0], socket.SOCK_STREAM) as probe:
            probe.bind((info[4][0], 0))
        family, host = info[0], str(info[4][0])
    except OSError:
        family, host = socket.AF_INET, ""
    listening = socket.create_server((host, port), family=family, backlog=128)
    listening.setblocking(False)
    return listening
