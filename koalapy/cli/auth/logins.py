"""Which login a command uses: one that is kept, or a new one from an agent of this head node."""

import sys
from pathlib import Path

from koalapy.cli.auth import saved_logins
from koalapy.cli.auth.saved_logins import Login, forget
from koalapy.cli.daemon import agent_socket
from koalapy.cli.errors import CliError, Exit, printable
from koalapy.cli.timeouts import command_timeouts
from koalapy.system.login_socket import DIRECTORY

__all__ = ["Login", "SilentAgentsError", "find", "forget", "log_in"]


class SilentAgentsError(CliError):
    """Agents of this host do not answer, and no other leads to the daemon: nobody knows whether one of them would."""


def find(url: str | None, well_known: Path = DIRECTORY) -> Login | None:
    """A login at a daemon, or where no URL was given at the only one that there is; None where no agent leads there.

    One that is about to end is renewed if that can be. ``CliError`` when an agent leads there and gives none.
    """
    kept = _kept(url)
    if kept is not None and not kept.is_due:
        return kept
    if not agent_socket.sockets(well_known):
        return kept
    with saved_logins.alone(command_timeouts().agent_login_s):
        made = _kept(url)
        if made is not None and not made.is_due:
            return made
        try:
            return log_in(kept.url if kept is not None else url, well_known)
        except CliError:
            if kept is None:
                raise
            return kept


def log_in(url: str | None, well_known: Path = DIRECTORY) -> Login | None:
    """A new login, which is kept; else as ``find``."""
    paths, timeouts = agent_socket.sockets(well_known), command_timeouts()
    if not paths:
        return None
    agents, wrong = agent_socket.agents(paths, timeouts, well_known)
    if url is not None:
        agents = [agent for agent in agents if agent.url == url]
    elif len(urls := sorted({agent.url for agent in agents})) > 1:
        raise CliError(f"agents of this host lead to {' and '.join(urls)}", Exit.USAGE, "set KOALA_URL to one of them")
    refused: CliError | None = None
    for agent in agents:
        try:
            login = agent_socket.log_in(agent, timeouts, well_known)
        except CliError as error:
            refused = refused or error
            continue
        _keep(login)
        return login
    if refused is not None:
        raise refused
    if wrong:
        raise SilentAgentsError(wrong[0], Exit.UNREACHABLE)
    return None


def _kept(url: str | None) -> Login | None:
    if url is not None:
        return saved_logins.of_url(url)
    kept = saved_logins.valid()
    if len(kept) > 1:
        urls = " and ".join(login.url for login in kept)
        raise CliError(f"this account is logged in at {urls}", Exit.USAGE, "set KOALA_URL to one of them")
    return kept[0] if kept else None


def _keep(login: Login) -> None:
    """The next command asks anew where it cannot be kept."""
    try:
        saved_logins.save(login)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        print(f"koala: the login is not kept: {printable(f'{saved_logins.directory()} {reason}')}", file=sys.stderr)
