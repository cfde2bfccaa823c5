"""``koala replay``: a recorded day once more, as it was or with other rules."""

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from koalapy.cli.errors import CliError, Exit, of_koala, printable
from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.cli.terminal.options import show_json
from koalapy.cli.terminal.progress import waiting_for
from koalapy.cli.terminal.tables import table
from koalapy.model.errors import KoalaError

if TYPE_CHECKING:
    from koalapy.policies.registry import Registry
    from koalapy.simulation.replay import History

Json = dict[str, Any]
MEANS = ("wait", "response")


def replay(
    file: Annotated[Path, Argument(help="as koala export wrote it")],
    policy: Annotated[str | None, Option(help="simulate the jobs by this policy", completes="policies")] = None,
    rule: Annotated[list[str] | None, Option(help="simulate with another rule: queue=fcfs")] = None,
    as_json: Annotated[bool, Option("--json", help="for programs")] = False,
) -> int:
    """Do again what a daemon's scheduler did: koala export -o day.gz; koala replay day.gz

    Nothing is asked of a daemon, and nothing runs. Without change it does the same again, placement by placement. With
    another policy or rule the same jobs are simulated: they come when they came and run as long as they ran, and nodes
    that others had are theirs again. "simulated" is that without the change, to be held against.
    """
    from koalapy.policies.installed import policies
    from koalapy.simulation.replay import replay

    found, changes, lost = [], _changes(rule or []), list[str]()
    try:
        with waiting_for(f"replays {file}"):
            for history in replay(file, known := policies(), lost):
                told = _told(history)
                if (policy or changes) and history.divergence is None and history.jobs:
                    told["derived"] = _derived(history, known, policy or "", changes)
                found.append(told)
    except KoalaError as error:
        raise of_koala(error) from error
    if as_json:
        show_json({"file": str(file), "lives": found, "lost": lost})
    else:
        for told in found:
            print(_line(told))
            if "derived" in told:
                print(_page(told["derived"]))
        if not found:
            print("nothing was recorded then", file=sys.stderr)
    if any(told["divergence"] for told in found):
        raise CliError("the replay did something else than what was recorded", Exit.FAILED, _why(found))
    if lost:
        hint = "what was told there is missing; files of the record can be restored from a backup, or removed"
        raise CliError(printable(f"not all that was is in it: {'; '.join(lost)}"), Exit.FAILED, hint)
    return Exit.OK


def _told(history: "History") -> Json:
    different = history.divergence
    return {
        "began": _moment(history.beginning.now),
        "ended": _moment(history.ended),
        "version": history.version,
        "steps": history.steps,
        "jobs": len(history.jobs),
        "placements": history.placements,
        "divergence": different
        and {
            "step": different.step,
            "at": _moment(different.at),
            "recorded": different.recorded,
            "replayed": different.replayed,
        },
    }


def _changes(rules: list[str]) -> Json:
    import yaml

    from koalapy.config.strict_yaml import DuplicateKey, load_yaml

    changes = {}
    for each in rules:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise CliError(f"{each!r} is no NAME=VALUE", Exit.USAGE, "write it as --rule queue=fcfs")
        try:
            changes[name] = load_yaml(value)
        except DuplicateKey as error:
            raise CliError(f"{value!r} is no value of a rule: {error}", Exit.USAGE) from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise CliError(
                f"{value!r} is no value of a rule", Exit.USAGE, "write it as in the configuration"
            ) from error
    return changes


def _derived(history: "History", policies: "Registry", policy: str, changes: Json) -> Json:
    from koalapy.simulation.derived import derive

    found = derive(history, policies, policy=policy, changes=changes)
    ways = ("recorded", "unchanged", "changed")
    return {
        "policy": policy,
        "rules": changes,
        "jobs": [
            {"job": job.job, "elsewhere": job.is_elsewhere} | {way: asdict(getattr(job, way)) for way in ways}
            for job in found.jobs
        ],
        "elsewhere": found.elsewhere,
        "means": {way: found.means(way) for way in ways},
        "left_out": dict(found.left_out),
        "remarks": list(found.remarks),
    }


def _page(derived: Json) -> str:
    called = {"recorded": "recorded", "unchanged": "simulated", "changed": "with the change"}
    rows = [
        [name, *(f"{value:.1f} s" if (value := derived["means"][way][what]) is not None else "-" for what in MEANS)]
        for way, name in called.items()
    ]
    count = len(derived["jobs"])
    told = [table(["", "WAIT", "RESPONSE"], rows), ""]
    told.append(f"means over {count} {'job' if count == 1 else 'jobs'}; {derived['elsewhere']} placed elsewhere")
    told += [f"left out, {why}: {number}" for why, number in derived["left_out"].items()]
    return "\n".join([*told, *derived["remarks"]])


def _line(told: Json) -> str:
    what = f"{told['began']} to {told['ended']}: {told['jobs']} jobs, {told['placements']} placements"
    if (other := told["divergence"]) is None:
        return f"{what}, all as recorded ({told['steps']} steps)"
    return f"{what}; at {other['at']}, in step {other['step']}: {other['recorded']}; replayed: {other['replayed']}"


def _why(found: list[Json]) -> str:
    from koalapy import __version__

    others = sorted({told["version"] for told in found} - {__version__})
    return f"it was written by version {', '.join(others)}, and this is {__version__}" if others else ""


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
