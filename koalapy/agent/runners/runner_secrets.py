"""The secrets by which runners and their agent know each other: one for each node of each component, never sent.

They follow from one key, which lies in no file that is an agent's or a job's: a resource manager that is ours keeps it
in its memory, apart from its jobs; elsewhere it follows from the token that the agent shows its daemon, for whoever
knows that is the agent.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from koalapy.agent.components.component import lrm_name
from koalapy.agent.lrm.port import Lrm
from koalapy.runner.atomic_files import replace_file
from koalapy.runner.session import derive
from koalapy.runner.settings import SECRET_FILE

SCRYPT_COST = 2**14
"""Makes guessing a token by what was made of it expensive: 50 ms each."""


class RunnerSecrets:
    """Derives them, as often as they are asked for."""

    def __init__(self, lrm: Lrm, cluster: str, token: str) -> None:
        self._lrm, self._cluster, self._token = lrm, cluster, token
        self._own_key = b""

    def of(self, component: str, node: int) -> bytes | None:
        """The secret of one node of a component; None while the resource manager has not told the key."""
        key = self._lrm.runners_key()
        return None if key is None else derive(key or self._key_of_the_token(), "runner", component, str(node))

    def of_token(self, instance: str, token: str, node: int) -> bytes | None:
        """The same, of a component by its daemon and token."""
        return self.of(lrm_name(instance, token), node)

    def all_of(self, component: str, size: int) -> tuple[str, ...]:
        """As they are handed over; none while they are not known."""
        secrets = [self.of(component, node) for node in range(size)]
        return tuple(secret.hex() for secret in secrets if secret is not None)

    def _key_of_the_token(self) -> bytes:
        if not self._own_key:
            salt = f"koala runners of {self._cluster}".encode()
            self._own_key = hashlib.scrypt(self._token.encode(), salt=salt, n=SCRYPT_COST, r=8, p=1, dklen=32)
        return self._own_key


def secret_files(secrets: Sequence[str]) -> dict[str, bytes]:
    """What lies in a component's folder, for each node's runner to take: by name."""
    return {SECRET_FILE.format(node=node): secret.encode() for node, secret in enumerate(secrets)}


def write_secrets(folder: Path, secrets: Sequence[str]) -> None:
    """Write them there. Raise ``OSError``."""
    for name, secret in secret_files(secrets).items():
        replace_file(folder / name, secret, sync=False)
