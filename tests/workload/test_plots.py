"""Plots of reports, which are equal for equal reports."""

from pathlib import Path

import pytest

from koalapy.workload.measures import Samples, planned_row, report_of
from koalapy.workload.plan import Arrival
from tests.needs import MATPLOTLIB
from tests.workload.test_measures import Json, make_cluster, make_job, make_report

plots = pytest.importorskip("koalapy.workload.plots", reason=MATPLOTLIB.reason)
ALL = ["response", "coallocated", "utilisation", "cdf", "sizes"]
RUN = {"complete": False, "interrupted": "interrupted", "background_target": 0.0}


def draw_to_paths(runs: list[tuple[str, Json]], folder: Path, form: str = "svg") -> list[str]:
    folder.mkdir(exist_ok=True)
    paths: list[Path] = plots.draw_figures(runs, folder, form)
    assert all(path.stat().st_size > 1000 for path in paths)
    return [path.stem for path in paths]


@pytest.mark.parametrize("form", ["svg", "png"])
def test_draw_of_one_run_or_several_makes_all_figures(tmp_path: Path, form: str) -> None:
    runs = [("worst-fit", make_report("worst-fit", 10.0)), ("cluster-minimization", make_report("x", 15.0))]
    assert draw_to_paths(runs[:1] if form == "png" else runs * 5, tmp_path, form) == ALL


def test_draw_figures_of_same_report_is_reproducible(tmp_path: Path) -> None:
    runs = [("worst-fit", make_report("worst-fit", 10.0))]
    for name in ("one", "other"):
        draw_to_paths(runs, tmp_path / name)
    for name in ALL:
        first, second = ((tmp_path / folder / f"{name}.svg").read_text() for folder in ("one", "other"))
        assert first == second


def test_draw_figures_labels_its_axes(tmp_path: Path) -> None:
    with plots.mpl.rc_context(plots.STYLE):
        figures = [
            figure([("a", make_report("worst-fit", 10.0)), ("b", make_report("worst-fit", 9.0))])
            for figure in (
                plots.draw_response,
                plots.draw_coallocated,
                plots.draw_utilisation,
                plots.draw_cdf,
                plots.draw_sizes,
            )
        ]
    for figure in figures:
        assert all(ax.get_ylabel() for ax in figure.axes)
    assert "(s)" in figures[0].axes[0].get_ylabel()
    assert "(s)" in figures[2].axes[-1].get_xlabel()


def test_draw_figures_with_many_applications_and_clusters_succeeds(tmp_path: Path) -> None:
    """Without application names, each job may count as a separate application."""
    jobs = [make_job(number, application=f"job-{number}") for number in range(800)]
    samples = Samples()
    for time in (0.0, 1.0):
        samples.add_sample(time, [make_cluster(f"site-{number}", 4, 1, 1) for number in range(400)])
    assert draw_to_paths([("a", report_of(jobs, samples, {}, RUN))], tmp_path, "png") == ALL


def test_draw_figures_of_run_without_jobs_has_no_bars(tmp_path: Path) -> None:
    arrival = Arrival(0.0, "wave", {"request": {"type": "flexible", "total_size": 3}})
    empty = report_of([planned_row(1, arrival)], Samples(), {}, RUN)
    assert draw_to_paths([("a", empty)], tmp_path) == []
    samples = Samples()
    for time in (0.0, 1.0):
        samples.add_sample(time, [make_cluster("north", 4, 1, 1), make_cluster("south", 0, 0, 0)])
    waiting = report_of(
        [planned_row(1, arrival), make_job(2, wait=None, response=None, state="queued")], samples, {}, RUN
    )
    assert draw_to_paths([("a", waiting)], tmp_path) == ["utilisation"]
    assert draw_to_paths([("a", waiting), ("b", make_report("worst-fit", 10.0))], tmp_path) == ALL
