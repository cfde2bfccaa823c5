"""The configuration file that daemon and agents read if none is given."""

from collections.abc import Sequence
from pathlib import Path

INSTALLED_CONFIGURATIONS = ("~/.config/koala/koala.yaml", "/etc/koala/koala.yaml")
"""Configuration files of the account, and of the site."""


def installed_configuration(places: Sequence[str] = INSTALLED_CONFIGURATIONS) -> Path | None:
    """Return the configuration file of this host's daemon and agents, None if there is none.

    The account's own file precedes the site's. Return an unreadable file as well, so that reading it reports the error.
    """
    for name in places:
        path = Path(name).expanduser()
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            pass  # reading it reports the error
        return path
    return None
