"""Kill and suspend daemon, agents, resource managers and runners at random under load."""

import argparse
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.chaos import victims
from tests.chaos.run import Outcome, RunOptions, run
from tests.needs import find_postgresql
from tests.store.postgresql import Server

MAX_LISTED = 10
"""Violations that the summary lists for each rule."""


def main() -> int:
    """Return 0 without a violation, 1 with one, 2 if PostgreSQL is missing."""
    options = _parse()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    orders = RunOptions(seed, options.jobs, options.faults, options.minutes, options.postgresql)
    again = " --postgresql" if orders.postgresql else ""
    print(
        f"python -m tests.chaos --seed {seed} --jobs {orders.jobs} --faults {orders.faults}"
        f" --minutes {orders.minutes:g}{again}",
        flush=True,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for ctrl-C
    folder = Path(tempfile.mkdtemp(prefix="koala-chaos-", dir="/tmp"))
    server: Server | None = None
    try:
        if orders.postgresql:
            programs = find_postgresql()
            if programs is None:
                print("PostgreSQL is not installed: apt-get install postgresql", file=sys.stderr)
                return 2
            server = Server(programs)
            server.start()
        outcome = run(orders, folder, server)
    except BaseException:
        print(f"the run was aborted; see {folder}", file=sys.stderr)
        raise
    finally:
        victims.kill_all(folder)
        if server is not None:
            server.remove()
    print(summary(outcome))
    (folder / "violations").write_text("".join(f"{violation}\n" for violation in outcome.violations))
    if not outcome.violations and not options.keep:
        shutil.rmtree(folder)
    else:
        print(f"see {folder} (violations, marks, faults, daemon.log, data)")
    return 1 if outcome.violations else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="seed of the plan; by default a new one, which is printed")
    parser.add_argument("--jobs", type=int, default=700)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=5.0, help="duration of the run")
    parser.add_argument("--postgresql", action="store_true", help="use PostgreSQL, and restart it as well")
    parser.add_argument("--keep", action="store_true", help="keep the folder even without a violation")
    return parser.parse_args()


def summary(outcome: Outcome) -> str:
    """Return the counts of the run and its violations as text."""
    counts = ", ".join(f"{count} {name}" for name, count in sorted(outcome.states.items()))
    faults = ", ".join(f"{count} {name}" for name, count in sorted(outcome.faults.items()))
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
        violations = [f"  {violation}" for violation in outcome.violations if violation.rule == rule]
        lines += violations[:MAX_LISTED] + ([f"  … and {count - MAX_LISTED} more"] if count > MAX_LISTED else [])
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
