"""``koala advisor``: the tables of run times and of placements by advice."""

import json
from dataclasses import replace

from koalapy.model.advice import AdvisedPlacement, Option, Run, Size
from tests.cli.conftest import Koala, Server

OPTIONS = (Option(("north", "south"), 1.5, 0.0, 0.0, 15.0), Option(("north",), 1.0, None, 0.0, 10.0))
ADVISED = AdvisedPlacement(7, 1, 1000.0, "wave", 2, OPTIONS, "no cluster holds it alone", 15.0, 12.0)


def test_advisor_without_runs_prints_no_table(koala: Koala) -> None:
    assert koala("advisor").out == "nothing is known yet: no job whose program has a name has run to its end\n"
    assert koala("advisor", "record").out == "the policy auto has placed no job yet\n"
    assert json.loads(koala("advisor", "--json").out) == {"applications": []}


def test_advisor_lists_applications_with_times_and_verdict(koala: Koala, server: Server) -> None:
    for seconds in (10.0, 10.0, 10.0, 10.0):
        server.advisor.experience.add(Run("prime", Size(4), ("north",), seconds))
        server.advisor.experience.add(Run("prime", Size(4), ("north", "south"), seconds))
        server.advisor.experience.add(Run("wave", Size(4, 2), ("north",), seconds))
        server.advisor.experience.add(Run("wave", Size(4, 2), ("north", "south"), 3 * seconds))
    server.advisor.experience.add(Run("wave", Size(4, 2), ("north", "south"), 20.0, killed=True))
    assert koala("advisor").out.splitlines() == [
        "APPLICATION  NODES  CLUSTERS     RUNS          TIME                   SLOWDOWN             VERDICT",
        "prime        4      one          4             10.0 s (9.5 to 10.5)   -                    co-allocated",
        "             4      north+south  4             10.0 s (9.5 to 10.5)   1.00 (1.00 to 1.07)",
        "wave         4x2    one          4             10.0 s (9.5 to 10.5)   -                    one cluster",
        "             4x2    north+south  5 (1 killed)  30.0 s (28.5 to 31.6)  2.99 (2.81 to 3.19)",
    ]
    wave = json.loads(koala("advisor", "--json").out)["applications"][1]
    assert (wave["application"], wave["clusters"], wave["runs_on_several"], wave["killed_on_several"]) == (
        "wave",
        2,
        5,
        1,
    )
    assert [runs["processes_per_node"] for runs in wave["runs"]] == [2, 2]


def test_advisor_record_compares_predictions_with_outcomes(koala: Koala, server: Server) -> None:
    server.advisor.advised = [replace(ADVISED, job=8, predicted=None, actual=None), ADVISED]
    assert koala("advisor", "record").out.splitlines() == [
        "JOB  PLACED                    APPLICATION  CLUSTERS  PREDICTED  ACTUAL  ERROR  REASON",
        "8    1970-01-01T00:16:40.000Z  wave         2         -          -       -      no cluster holds it alone",
        "7    1970-01-01T00:16:40.000Z  wave         2         15.0 s     12.0 s  +25%   no cluster holds it alone",
        "",
        "Predictions of 1 run time were off by 25% on average.",
    ]
    assert koala("advisor", "record", "--application", "prime").out == "the policy auto has placed no job yet\n"
    (prediction,) = json.loads(koala("advisor", "record", "--limit", "1", "--json").out)["record"]
    assert prediction["options"][1] == {
        "clusters": ["north"],
        "slowdown": 1.0,
        "wait": None,
        "transfer": 0.0,
        "run": 10.0,
        "response": None,
    }
