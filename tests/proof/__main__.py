"""``python -m tests.proof --schedules 1000 --seed 1``: play schedules, and print violations with their seeds."""

import argparse
import sys
from collections import Counter
from contextlib import nullcontext

from koalapy.config.logs import configure_logging
from tests.proof.planted import PLANTED
from tests.proof.schedules import draw_dangerous_schedule, draw_schedule, play_schedules, run_schedule, shrink_schedule


def count_found(first: int, count: int) -> int:
    """Print in how many schedules each planted fault was found. Return 1 if one without a fault had a violation."""
    false_findings = 0
    for name, fault in {"nothing": nullcontext, **PLANTED}.items():
        found = 0
        for seed in range(first, first + count):
            found += bool(run_schedule(seed, fault=fault, elements=draw_dangerous_schedule(seed)).violations)
        print(f"{name}: found in {found} of {count}", flush=True)
        false_findings += found if fault is nullcontext else 0
    return bool(false_findings)


def main() -> int:
    """Play schedules, or repeat and shrink one. Return 1 if there was a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100, help="how many; default 100")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first; default 1")
    parser.add_argument("--replay", type=int, metavar="SEED", help="repeat one, and shrink it if it fails")
    parser.add_argument("--without", default="", metavar="NAME,…", help="leave elements out of a replay")
    parser.add_argument("--planted", type=int, metavar="N", help="play N dangerous schedules with each planted fault")
    parser.add_argument("--log", default="critical", help="level of the log; default critical")
    options = parser.parse_args()
    configure_logging(options.log)
    if options.planted is not None:
        return count_found(options.seed, options.planted)
    if options.replay is not None:
        without = set(filter(None, options.without.split(",")))
        for element in draw_schedule(options.replay):
            note = "  (left out)" if element.name in without else ""
            print(f"{element.at:7.2f} s  {element.name}: {element.kind}{note}")
        outcome = run_schedule(options.replay, without)
        print(*outcome.violations or ["no violation"], sep="\n")
        if outcome.violations and not without:
            print("needed:", ", ".join(f"{e.name} ({e.kind})" for e in shrink_schedule(options.replay)))
        return bool(outcome.violations)
    failed, processor_s, totals = 0, 0.0, Counter[str]()
    for outcome, seconds in play_schedules(options.seed, options.schedules):
        processor_s += seconds
        totals.update(jobs=outcome.jobs, attempts=outcome.attempts, hours=outcome.virtual_s / 3600)
        if outcome.violations:
            failed += 1
            print(f"seed {outcome.seed}:", *outcome.violations, sep="\n  ", flush=True)
    print(
        f"{options.schedules} schedules, {failed} with violations; {totals['jobs']} jobs, {totals['attempts']} attempts"
    )
    print(f"{totals['hours']:.0f} virtual hours, {options.schedules / processor_s:.1f} schedules per processor second")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
