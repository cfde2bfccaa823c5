"""Commands that run the relays of links between clusters whose nodes cannot reach each other."""

from pathlib import Path
from typing import Annotated

from koalapy.cli.terminal.arguments import Group, Option

RelayConfig = Annotated[Path, Option("--config", help="configuration file in YAML")]


def start_hub(config: RelayConfig) -> None:
    """Run the hub of relayed links, beside the daemon."""
    from koalapy.relay.main import run_hub

    run_hub(config)


def start_head(config: RelayConfig) -> None:
    """Run the relay of one cluster, beside its agent."""
    from koalapy.relay.main import run_head

    run_head(config)


relay_group = Group(
    "Relay MPI traffic between clusters whose nodes cannot reach each other.", {"hub": start_hub, "head": start_head}
)
