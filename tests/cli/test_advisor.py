"""``koala advisor``: the tables of run times and of predictions."""

import json
from dataclasses import replace

from koalapy.model.advice import AdvisedPlacement, Option, Run, Size
from koalapy.model.job import JobState
from koalapy.model.prediction import Course, Prediction, PredictionKind, PredictionSource
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
        "",
        "FORETOLD          LAST  DECIDED  JOBS  WITHIN  EARLY  LATE  MEDIAN ERROR  BIAS   OPEN  CENSORED",
        "run time by auto  1 d   1        1     -       -      -     0:03          -0:03  0     0",
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


def test_advisor_record_shows_accuracy_by_kind_and_period(koala: Koala, server: Server) -> None:
    server.advisor.now = 1e6
    predictions = [
        (Prediction(job, PredictionKind.START, made_at, PredictionSource.DAEMON, 0, 60.0, 90.0, 120.0), course)
        for job, made_at, course in (
            (1, 1e6 - 500.0, Course(JobState.RUNNING, started_at=1e6 - 400.0)),
            (2, 1e6 - 500.0, Course(JobState.QUEUED)),
            (3, 1e6 - 50.0, Course(JobState.QUEUED)),
            (4, 1e6 - 50.0, Course(JobState.CANCELLED, ended_at=1e6 - 40.0)),
            (5, 1e6 - 2 * 86400.0, Course(JobState.RUNNING, started_at=1e6 - 2 * 86400.0 + 10.0)),
        )
    ]
    server.advisor.outcomes = predictions
    assert koala("advisor", "record").out.splitlines() == [
        "the policy auto has placed no job yet",
        "",
        "FORETOLD  LAST  DECIDED  JOBS  WITHIN           EARLY  LATE  MEDIAN ERROR  BIAS   OPEN  CENSORED",
        "start     1 d   2        2     50% (9% to 91%)  0%     50%   3:30          +3:30  1     1",
        "start     7 d   3        3     33% (6% to 79%)  33%    33%   1:20          +0:10  1     1",
    ]
