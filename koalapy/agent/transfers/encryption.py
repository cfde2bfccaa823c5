"""Transfers on an encrypted way: what the source shows, and how each side's tunnel is started (``tunnel.py``)."""

import asyncio
import os
import shlex
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from koalapy.agent.accounts.accounts import plain
from koalapy.agent.transfers.tunnel import CERTIFICATE, HOST, PORT

Encrypts = Callable[[str], bool]
"""Whether nothing may go in clear between this cluster and another."""
TUNNEL = str(Path(__file__).with_name("tunnel.py"))
_PYTHON = [sys.executable, "-I", "-S"]
"""Without site packages, which would take longer to find than all else of a short transfer."""
_LIFETIME = timedelta(days=3650)
"""For form's sake: who pulls knows the very certificate, and forgets it after the transfer."""


def always(cluster: str) -> bool:
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
        shown = signed.public_bytes(Encoding.PEM)
        self.certificate = shown.decode()
        # Never on a disk: each tunnel inherits it, and nobody else.
        self._memory = os.memfd_create("transfers", os.MFD_CLOEXEC)
        with open(os.dup(self._memory), "wb") as file:
            file.write(shown + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    def close(self) -> None:
        os.close(self._memory)

    async def start_tunnel(
        self, connection: socket.socket, rsync: socket.socket, timeout: float
    ) -> asyncio.subprocess.Process:
        """Have what comes on a connection encrypted go to a socket in clear, and back, if it speaks TLS within so many
        seconds. Raises ``OSError``."""
        return await asyncio.create_subprocess_exec(
            *plain(*_PYTHON, TUNNEL, "serve", str(rsync.fileno()), str(self._memory), str(timeout)),
            cwd="/",
            stdin=connection.fileno(),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=[rsync.fileno(), self._memory],
            start_new_session=True,
            env={"LC_ALL": "C"},
        )


def through_tunnel(host: str, port: int, certificate: str) -> dict[str, str]:
    """Variables by which an rsync goes to a source through a tunnel of its own."""
    command = shlex.join([*_PYTHON, TUNNEL, "connect"]).replace("%", "%%")
    return {"RSYNC_CONNECT_PROG": command, HOST: host, PORT: str(port), CERTIFICATE: certificate}
