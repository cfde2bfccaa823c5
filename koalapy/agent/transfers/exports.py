"""Ways by which other sites pull replicas of this one: rsync daemons, each for one connection and what it has a
ticket for."""

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import structlog
from pydantic import BaseModel, Field

from koalapy.agent.accounts import drop_capabilities
from koalapy.agent.core.questions import ASKER
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentTimeouts
from koalapy.agent.transfers.replicas import ReplicaRequest, Replicas
from koalapy.agent.transfers.tunnel import CERTIFICATE, HOST, PORT
from koalapy.model.errors import SiteFault, SiteRejected
from koalapy.runner.atomic_files import replace_file
from koalapy.system.event_loop import TLS_FIRST_BYTE, BackgroundTasks, peek_first_byte

log = structlog.get_logger()

RequiresEncryption = Callable[[str], bool]
"""Whether nothing may go in clear between this cluster and another."""
TUNNEL = str(Path(__file__).with_name("tunnel.py"))
_PYTHON = [sys.executable, "-I", "-S"]
"""Without site packages, which would take longer to find than all else of a short transfer."""
_LIFETIME = timedelta(days=3650)
"""For form's sake: who pulls knows the very certificate, and forgets it after the transfer."""


def always_required(cluster: str) -> bool:
    return True


class TransferIdentity:
    """A certificate of this agent's own, made anew by each, that pullers are told along with their tickets."""

    def __init__(self) -> None:
        """Takes a moment, and raises ``OSError``."""
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
        # Never on a disk: each tunnel inherits it, and nobody else.
        self._memory = os.memfd_create("transfers", os.MFD_CLOEXEC)
        with open(os.dup(self._memory), "wb") as file:
            file.write(certificate + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    def close(self) -> None:
        os.close(self._memory)

    async def start_tunnel(
        self, connection: socket.socket, rsync: socket.socket, timeout: float
    ) -> asyncio.subprocess.Process:
        """Have what comes on a connection encrypted go to a socket in clear, and back, if it speaks TLS within so many
        seconds. Raises ``OSError``."""
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


def tunnel_environment(host: str, port: int, certificate: str) -> dict[str, str]:
    """Variables by which an rsync goes to a source through a tunnel of its own."""
    command = shlex.join([*_PYTHON, TUNNEL, "connect"]).replace("%", "%%")
    return {"RSYNC_CONNECT_PROG": command, HOST: host, PORT: str(port), CERTIFICATE: certificate}


RSYNC = "rsync"
USER = "koala"
TICKET_LIFETIME = 24 * 3600.0
"""Seconds after which a ticket is not valid any more; who has one gives it back before."""
MAX_TICKETS = 256
"""Of more the oldest ends: nobody may have given it back, and who has begun to pull by it needs it no more."""
MAX_CONNECTIONS = 64
LOG = "rsync.log"
MAX_LOG_SIZE = 10_000_000
"""Bytes."""
IO_TIMEOUT = 60
"""Seconds without a byte after which a connection is given up."""
MAX_CERTIFICATE_LENGTH = 4096
"""Characters."""
CONFIGURATIONS = {False: "rsyncd.conf", True: "rsyncd-encrypted.conf"}
"""For those who come in clear, and for those who speak TLS: a ticket of one kind is nothing to the other."""
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


def missing_programs() -> list[str]:
    """Programs without which no files can be pulled here, or from here, that this host has not."""
    return [] if shutil.which(RSYNC) else [RSYNC]


class Route(BaseModel):
    """The answer to ``export``: by which way one puller gets what it asked for, once and for a while."""

    host: str = Field(pattern=r"^[A-Za-z0-9._:-]+$")
    port: int = Field(gt=0, lt=65536)
    module: str = Field(pattern=r"^[0-9a-f]+$")
    user: str = Field(pattern=r"^[a-z]+$")
    password: str = Field(pattern=r"^[0-9A-Za-z]*$", max_length=200)
    kind: Literal["file", "folder"]
    certificate: str = Field(default="", max_length=MAX_CERTIFICATE_LENGTH, pattern=r"^[\t\n\r -~]*$")
    """What must be shown there, in PEM; empty where no TLS is spoken."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What one puller may read: all of a folder, or one entry of it, whose name is the module's only one."""

    module: str
    password: str
    folder: int
    """Descriptor of the folder: it stays the same whatever becomes of its path."""
    entry: str | None
    encrypted: bool
    alarm: asyncio.TimerHandle


class Exports:
    """Answers the questions ``export`` and ``unexport``, and serves those who have a ticket."""

    def __init__(
        self,
        replicas: Replicas,
        directory: Path,
        address: str,
        port: int | None,
        encrypts: RequiresEncryption = always_required,
        timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
        *,
        max_tickets: int = MAX_TICKETS,
        max_log_size: int = MAX_LOG_SIZE,
    ) -> None:
        """``directory`` is for what rsync must be told; ``address`` is where other sites reach this one.

        ``encrypts`` says to which clusters nothing may go in clear.
        """
        self._encrypts, self._login_s = encrypts, timeouts.transfer_login_s
        self._max_tickets, self._max_log_size = max_tickets, max_log_size
        self._identity: TransferIdentity | None = None
        self._replicas, self._directory = replicas, directory
        self._address, self._port = address, port or 0
        self._tickets: dict[str, Ticket] = {}
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.subprocess.Process] = set()
        """The rsync daemons."""
        self._serving = BackgroundTasks()

    async def export_replica(self, payload: Mapping[str, Any]) -> dict[str, object]:
        """Where to pull from, once it is clear that the replica is there; ``SiteError``."""
        request, asker = ReplicaRequest.model_validate(payload), str(payload.get(ASKER, ""))
        if not request.encrypted and self._encrypts(asker):
            raise SiteRejected(
                f"nothing goes from here to {asker or 'others'} in clear, which is how its agent wants it",
                hint="update that agent, or have both sides say otherwise: encrypt_transfers, or encrypted of the link",
                fault=SiteFault.IN_CLEAR,
            )
        if shutil.which(RSYNC) is None:
            raise SiteRejected("there is no rsync on its head node: install it there", fault=SiteFault.NO_RSYNC)
        path = await asyncio.to_thread(self._replicas.check_replica, request)
        folder, entry = await asyncio.to_thread(self._open, path)
        try:
            self._listen()
        except SiteRejected:
            os.close(folder)
            raise
        if len(self._tickets) >= self._max_tickets:
            self._revoke(next(iter(self._tickets)))
        module = secrets.token_hex(8)
        alarm = asyncio.get_running_loop().call_later(TICKET_LIFETIME, self._revoke, module)
        ticket = Ticket(module, secrets.token_hex(16), folder, entry, request.encrypted, alarm)
        self._tickets[module] = ticket
        try:
            if request.encrypted and self._identity is None:
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
            certificate=self._identity.certificate if request.encrypted and self._identity else "",
        ).model_dump()

    async def revoke_ticket(self, payload: Mapping[str, Any]) -> dict[str, object]:
        """Revoke a ticket."""
        self._revoke(str(payload.get("module", "")))
        return {}

    async def close(self) -> None:
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
        """The folder to be served, and which entry of it alone."""
        with self._replicas.roots.open_path(path) as opened:
            only = None if opened.is_folder else opened.name
            return os.dup(opened.parent if only else opened.descriptor), only

    def _revoke(self, module: str) -> None:
        if module in self._tickets:
            self._end(module)
            self._write()

    def _end(self, module: str) -> None:
        """Also without another configuration a ticket is worth nothing then: its folder and its secret are gone."""
        ticket = self._tickets.pop(module)
        ticket.alarm.cancel()
        if any(not _has_begun(process.pid) for process in self._connections):
            # It may have been let in by this ticket, and would serve whatever has the descriptor's number next.
            asyncio.get_running_loop().call_later(self._login_s, os.close, ticket.folder)
        else:
            os.close(ticket.folder)
        with contextlib.suppress(OSError):
            self._secrets(module).unlink()

    # rsync's configuration, which it reads anew for every connection

    def _secrets(self, module: str) -> Path:
        return self._directory / f"{module}.secret"

    def _write(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        log_file = self._directory / LOG
        with contextlib.suppress(FileNotFoundError):
            if log_file.stat().st_size > self._max_log_size:
                log_file.unlink()
        header = HEADER.format(silence=IO_TIMEOUT, log=log_file)
        if os.geteuid() == 0:
            # By default it would become another user, who can read less than the jobs.
            header += "uid = 0\ngid = 0\n"
        texts = dict.fromkeys(CONFIGURATIONS, header)
        for ticket in self._tickets.values():
            secret = self._secrets(ticket.module)
            if not secret.exists():
                secret.touch(mode=0o600)
                secret.write_text(f"{USER}:{ticket.password}\n")
            path = f"/proc/self/fd/{ticket.folder}"  # of rsync itself, which inherits it: nobody looks into an agent
            texts[ticket.encrypted] += MODULE.format(module=ticket.module, path=path, user=USER, secrets=secret)
            if ticket.entry is not None:
                texts[ticket.encrypted] += ONLY.format(pattern=filter_pattern(ticket.entry))
        for encrypted, text in texts.items():
            replace_file(self._directory / CONFIGURATIONS[encrypted], text.encode(), sync=False)

    # Connections

    def _listen(self) -> None:
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
        log.info("serves files", action="files-served", address=self._address, port=self._listening.getsockname()[1])

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self._serving.running) >= MAX_CONNECTIONS:
                await asyncio.wait(self._serving.running, return_when=asyncio.FIRST_COMPLETED)
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("cannot accept a transfer", action="transfer-not-accepted", reason=str(error))
                await asyncio.sleep(1.0)
                continue
            self._serving.spawn(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        """Have an rsync of its own speak with one puller; it begins to read only what the configuration says now."""
        with contextlib.ExitStack() as ours:
            ours.enter_context(connection)
            try:
                async with asyncio.timeout(self._login_s):
                    first = await peek_first_byte(connection)
                connection.setblocking(True)
                if first == TLS_FIRST_BYTE and self._identity is not None:
                    rsync_end, tunnel_end = socket.socketpair()
                    ours.enter_context(tunnel_end)
                    process = await self._start_rsync(rsync_end, ours, encrypted=True)
                    processes = [process, await self._identity.start_tunnel(connection, tunnel_end, self._login_s)]
                elif first and first != TLS_FIRST_BYTE:
                    processes = [await self._start_rsync(connection, ours, encrypted=False)]
                else:
                    return
            except TimeoutError:
                return
            except OSError as error:
                log.warning("rsync cannot be run", action="rsync-failed", reason=str(error))
                return
        for process in processes:
            await self._await_end(process)

    async def _start_rsync(
        self, connection: socket.socket, ours: contextlib.ExitStack, *, encrypted: bool
    ) -> asyncio.subprocess.Process:
        """An rsync daemon that speaks on a socket, which is closed here when ``ours`` is. Raises ``OSError``."""
        ours.enter_context(connection)
        process = await asyncio.create_subprocess_exec(
            *drop_capabilities(RSYNC, "--daemon", f"--config={self._directory / CONFIGURATIONS[encrypted]}"),
            cwd="/",
            stdin=connection.fileno(),
            stdout=connection.fileno(),
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=[ticket.folder for ticket in self._tickets.values() if ticket.encrypted is encrypted],
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
        )
        self._connections.add(process)
        return process

    async def _await_end(self, process: asyncio.subprocess.Process) -> None:
        """Whoever has shown no ticket in time is hung up on."""
        try:
            async with asyncio.timeout(self._login_s):
                await process.wait()
        except TimeoutError:
            if process in self._connections and not _has_begun(process.pid):
                kill_group(process)
            await process.wait()
        self._connections.discard(process)


def kill_group(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _has_begun(pid: int) -> bool:
    """Whether an rsync has let its puller in: only then it goes to where the replica is."""
    try:
        return os.readlink(f"/proc/{pid}/cwd") != "/"
    except OSError:
        return False


def filter_pattern(name: str) -> str:
    """A filter pattern of rsync's that matches a name: whatever means something there stands for any one byte."""
    return re.sub(rb"[^A-Za-z0-9._-]", b"?", os.fsencode(name)).decode()


def _listener(address: str, port: int) -> socket.socket:
    """On the address if it is this host's own, else on all: other sites may know it by another one."""
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
