"""``python -m tests.chaos``: kills and stops daemon, agents, resource managers and runners at random under load."""

import argparse
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.chaos import victims
from tests.chaos.run import Orders, Outcome, run
from tests.needs import find_postgresql
from tests.store.postgresql import Server

SHOWN = 10
"""Violations of each rule."""


def main() -> int:
    """0 when nothing was wrong, 1 when something was, 2 when it cannot be played here."""
    options = _parse()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    orders = Orders(seed, options.jobs, options.faults, options.minutes, options.postgresql)
    again = " --postgresql" if orders.postgresql else ""
    print(
        f"python -m tests.chaos --seed {seed} --jobs {orders.jobs} --faults {orders.faults}"
        f" --minutes {orders.minutes:g}{again}",
        flush=True,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for ctrl-C
    ground = Path(tempfile.mkdtemp(prefix="koala-chaos-", dir="/tmp"))
    server: Server | None = None
    try:
        if orders.postgresql:
            folder = find_postgresql()
            if folder is None:
                print("there is no PostgreSQL here: apt-get install postgresql", file=sys.stderr)
                return 2
            server = Server(folder)
            server.start()
        outcome = run(orders, ground, server)
    except BaseException:
        print(f"it was broken off; see {ground}", file=sys.stderr)
        raise
    finally:
        victims.kill_all(ground)
        if server is not None:
            server.remove()
    print(summary(outcome))
    (ground / "violations").write_text("".join(f"{violation}\n" for violation in outcome.violations))
    if not outcome.violations and not options.keep:
        shutil.rmtree(ground)
    else:
        print(f"to look at: {ground} (violations, marks, faults, daemon.log, data)")
    return 1 if outcome.violations else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="plays the same plan again; by default a new one, which is printed")
    parser.add_argument("--jobs", type=int, default=700)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=5.0, help="after which it is over in any case")
    parser.add_argument("--postgresql", action="store_true", help="with PostgreSQL, which is restarted, too")
    parser.add_argument("--keep", action="store_true", help="leave the folder though nothing was wrong")
    return parser.parse_args()


def summary(outcome: Outcome) -> str:
    """What happened, and what was wrong."""
    counts = ", ".join(f"{count} {what}" for what, count in sorted(outcome.states.items()))
    faults = ", ".join(f"{count} {what}" for what, count in sorted(outcome.faults.items()))
    rules = Counter(violation.rule for violation in outcome.violations)
    lines = [
        f"{sum(outcome.states.values())} of {outcome.orders.jobs} jobs: {counts}",
        f"{outcome.attempts} attempts ({outcome.restarts} restarts), {outcome.ranks} ranks, "
        f"{outcome.local_users} local users",
        f"{sum(outcome.faults.values())} of {outcome.orders.faults} faults: {faults}",
        f"{outcome.starts} starts of the daemon, {outcome.looks} looks at clusters, {outcome.seconds:.0f} s",
        f"{len(outcome.violations)} violations: {', '.join(f'{count} {rule}' for rule, count in rules.items())}",
    ]
    for rule, count in rules.items():
        found = [f"  {violation}" for violation in outcome.violations if violation.rule == rule]
        lines += found[:SHOWN] + ([f"  … and {count - SHOWN} more of these"] if count > SHOWN else [])
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
