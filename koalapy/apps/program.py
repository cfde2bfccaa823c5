"""Parse the options of a program, share its work among ranks, and print its report."""

import argparse
import os
import sys

from mpi4py import MPI


def describe_rank(world: MPI.Intracomm) -> str:
    """Return the node and process of this rank; the runner provides the name of the node."""
    cluster, node = os.environ.get("KOALA_CLUSTER", ""), os.environ.get("KOALA_NODE", "")
    place = f"{cluster}/{node}" if cluster and node else MPI.Get_processor_name()
    return f"rank {world.rank} on {place} (pid {os.getpid()})"


def create_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every program has."""
    options = argparse.ArgumentParser(description=text)
    options.add_argument("--no-where", dest="where", action="store_false", help="do not tell which rank ran where")
    return options


def parse_options(options: argparse.ArgumentParser, world: MPI.Intracomm) -> argparse.Namespace:
    """Parse the options on every rank; only rank 0 prints errors."""
    if world.rank != 0:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        return options.parse_args()
    finally:
        sys.stderr = sys.__stderr__


def print_report(world: MPI.Intracomm, result: str, check: str, passed: bool, places: bool) -> int:
    """Print the report on rank 0; return the exit code for every rank, which is 0 if the check passed."""
    rank_lines = world.gather(describe_rank(world), root=0)
    passed = world.bcast(passed, root=0)
    if rank_lines is not None:
        if places:
            print("\n".join(rank_lines))
        print(result)
        print(f"check: {check}: {'passed' if passed else 'FAILED'}", flush=True)
    return 0 if passed else 1


def rank_range(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the half-open range of ``range(total)`` that belongs to this rank."""
    share, remainder = divmod(total, ranks)
    start = rank * share + min(rank, remainder)
    return start, start + share + (1 if rank < remainder else 0)
