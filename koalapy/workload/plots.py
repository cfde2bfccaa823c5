"""The figures of mohamed-2005 and sonmez-2010, drawn from reports with matplotlib."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from koalapy.workload.measures import ENDED, Samples, by_application, compute_means, group_jobs, has_run, mean_of

Json = dict[str, Any]
Runs = Sequence[tuple[str, Json]]
"""(label, report) pairs."""

# The colours of Okabe and Ito can be distinguished with colour blindness.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#8C8C8C",
)
LINES = [(BLUE, "-"), (RED, "--"), (GREEN, "-."), (PURPLE, ":"), (ORANGE, "-"), (SKY, "--")]
STYLE: Any = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "axes.titlesize": 11,
    "legend.frameon": False,
    "svg.hashsalt": "koala",
    "hatch.linewidth": 0.6,
}


MOST_APART = 20
"""Maximum number of clusters or applications that are shown separately, and of sizes with a value at each bar."""


def draw_figures(runs: Runs, folder: Path, form: str) -> list[Path]:
    """Write each figure for which the runs have data, in format ``form`` (``png`` or ``svg``); return the paths."""
    figures: dict[str, Callable[[Runs], Figure | None]] = {
        "response": draw_response,
        "coallocated": draw_coallocated,
        "utilisation": draw_utilisation,
        "cdf": draw_cdf,
        "sizes": draw_sizes,
    }
    drawn = []
    with mpl.rc_context(STYLE):
        for name, figure_of in figures.items():
            figure = figure_of(runs)
            if figure is not None:
                path = folder / f"{name}.{form}"
                figure.savefig(path, dpi=120, metadata={"Date": None} if form == "svg" else None)
                drawn.append(path)
    return drawn


def _create_figure(
    columns: int = 1, rows: int = 1, *, width: float = 6.4, height: float = 4.0
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a size in inches, and its axes row by row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [ax for line in axes for ax in line]


def _bars_of(runs: Runs) -> list[tuple[float, str, str, Json]]:
    """Return position, run, application and means of each bar: grouped by application, one bar for each run."""
    groups = [(label, {g["application"]: g for g in by_application(report["jobs"])}) for label, report in runs]
    applications = sorted({name for _, application_means in groups for name in application_means})
    if len(applications) > MOST_APART:
        applications = ["all"]
        groups = [(label, {"all": compute_means(report["jobs"])}) for label, report in runs]
    bars: list[tuple[float, str, str, Json]] = []
    for place, application in enumerate(applications):
        for index, (label, application_means) in enumerate(groups):
            if application in application_means:
                bars.append((place * (len(runs) + 1) + index, label, application, application_means[application]))
    return bars


def _name_bars(ax: Axes, runs: Runs, bars: Sequence[tuple[float, str, str, Json]]) -> None:
    """Label each bar with its run or, for a single run, its application; name applications above groups."""
    places = {application: int(position) // (len(runs) + 1) for position, _, application, _ in bars}
    names = [label if len(runs) > 1 else application for _, label, application, _ in bars]
    wide = len(bars) > 4 or max(map(len, names), default=0) > 14
    ax.set_xticks(
        [position for position, *_ in bars], names, rotation=30 if wide else 0, ha="right" if wide else "center"
    )
    ax.grid(axis="x", visible=False)
    right = max(position for position, *_ in bars)
    room = max(0.7, 1.2 - right / 2)
    ax.set_xlim(-room, right + room)
    if len(places) > 1 and len(runs) > 1:
        for application, place in places.items():
            middle = place * (len(runs) + 1) + (len(runs) - 1) / 2
            ax.text(middle, 1.02, application, ha="center", transform=ax.get_xaxis_transform(), fontweight="bold")


def draw_response(runs: Runs) -> Figure | None:
    """Draw the mean response time of each application, split into wait and execution (sonmez-2010, figure 6a).

    Return None without data.
    """
    bars = [bar for bar in _bars_of(runs) if bar[3]["response_time"] is not None]
    if not bars:
        return None
    figure, (ax,) = _create_figure(width=max(5.0, 2.2 + 0.75 * len(bars)), height=4.4)
    positions = [bar[0] for bar in bars]
    wait, execution = ([bar[3][name] or 0.0 for bar in bars] for name in ("wait_time", "execution_time"))
    ax.bar(positions, execution, 0.75, color=BLUE, label="execution")
    ax.bar(positions, wait, 0.75, bottom=execution, color=ORANGE, label="wait", hatch="///", edgecolor="white")
    for position, wait_s, execution_s in zip(positions, wait, execution, strict=True):
        ax.annotate(
            f"{wait_s + execution_s:.1f}",
            (position, wait_s + execution_s),
            (0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    _name_bars(ax, runs, bars)
    ax.set_ylabel("mean response time (s)")
    ax.margins(y=0.12)
    ax.legend(reverse=True, loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=2)
    return figure


def draw_coallocated(runs: Runs) -> Figure | None:
    """Draw the fraction of jobs that used several clusters (sonmez-2010, figure 6b); return None without data."""
    bars = [bar for bar in _bars_of(runs) if bar[3]["coallocated"] is not None]
    if not bars:
        return None
    figure, (ax,) = _create_figure(width=max(5.0, 2.2 + 0.75 * len(bars)), height=4.0)
    parts = [bar[3]["coallocated"] for bar in bars]
    ax.bar([bar[0] for bar in bars], parts, 0.75, color=GREEN)
    for bar, part in zip(bars, parts, strict=True):
        ax.annotate(f"{part:.0%}", (bar[0], part), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    _name_bars(ax, runs, bars)
    ax.set_ylim(0, 1.08)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylabel("co-allocated jobs")
    return figure


def draw_utilisation(runs: Runs) -> Figure | None:
    """Draw the nodes used by jobs and local users over time (mohamed-2005, figure 2).

    A single run also gets a panel for each cluster. Return None without data.
    """
    panels: list[tuple[str, Samples, list[str]]] = []
    for label, report in runs:
        samples = Samples(report["samples"])
        names = sorted(samples.clusters)
        if len(samples.at) < 2:
            continue
        panels.append((label if len(runs) > 1 else "all clusters", samples, names))
        if len(runs) == 1 and 1 < len(names) <= MOST_APART:
            panels += [(name, samples, [name]) for name in names]
    if not panels:
        return None
    figure, axes = _create_figure(rows=len(panels), width=8.0, height=0.9 + 1.75 * len(panels))
    for ax, (title, samples, names) in zip(axes, panels, strict=True):
        _fill_stacked(ax, samples, names)
        ax.set_title(title, loc="left")
        ax.set_ylabel("nodes in use")
        ax.set_xlim(0, max(panel[1].at[-1] for panel in panels))
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        ax.set_ylim(0, 1)
    axes[-1].set_xlabel("time (s)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def _fill_stacked(ax: Axes, samples: Samples, names: Sequence[str]) -> None:
    """Fill the areas of nodes used by jobs and, above them, by local users, as fractions of all nodes."""

    def fractions(column: str) -> list[float]:
        counts = [sum(samples.clusters[name][column][i] for name in names) for i in range(len(samples.at))]
        return [count / total if total else 0.0 for count, total in zip(counts, totals, strict=True)]

    totals = [sum(samples.clusters[name]["total"][i] for name in names) for i in range(len(samples.at))]
    used, background = fractions("used"), fractions("background")
    both = [used_share + background_share for used_share, background_share in zip(used, background, strict=True)]
    ax.fill_between(samples.at, used, step="post", color=BLUE, linewidth=0, label="jobs of this scheduler")
    ax.fill_between(samples.at, used, both, step="post", color=ORANGE, linewidth=0, label="background")


def draw_cdf(runs: Runs) -> Figure | None:
    """Draw the cumulative distribution of response times; return None without data."""
    figure, (ax,) = _create_figure()
    lines = 0
    for (label, report), (colour, style) in zip(runs, LINES * len(runs), strict=False):
        times = sorted(job["response_time"] for job in report["jobs"] if has_run(job))
        if times:
            parts = [(index + 1) / len(times) for index in range(len(times))]
            ax.step([times[0], *times], [0.0, *parts], where="post", color=colour, linestyle=style, label=label)
            lines += 1
    if not lines:
        return None
    ax.set_xlabel("response time (s)")
    ax.set_ylabel("jobs that ended within it")
    ax.set_xlim(left=0)
    ax.set_ylim(0, 1.01)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    if len(runs) > 1:
        ax.legend(loc="lower right")
    return figure


def draw_sizes(runs: Runs) -> Figure | None:
    """Draw failures, co-allocation, placement time and start delay by job size (mohamed-2005, figures 3 to 5).

    Return None without data.
    """
    series = _series_by_size(runs)
    keys = sorted({key for _, groups in series for key in groups}, key=lambda key: (key[0], key[1] or 0))
    if not keys:
        return None
    figure, axes = _create_figure(2, 2, width=min(30.0, max(9.0, 2.0 + 0.6 * len(keys))), height=6.4)
    panels: list[tuple[str, Callable[[list[Json]], float | None], bool]] = [
        ("failed attempts", lambda jobs: compute_means(jobs)["failures"], True),
        ("co-allocated jobs", lambda jobs: compute_means(jobs)["coallocated"], True),
        ("placement time (s)", lambda jobs: mean_of(jobs, "queue_time"), False),
        ("start delay (s)", lambda jobs: mean_of(jobs, "start_delay"), False),
    ]
    width = 0.8 / len(series)
    for ax, (title, figure_of, is_part) in zip(axes, panels, strict=True):
        for index, ((label, groups), (colour, _)) in enumerate(zip(series, LINES * len(series), strict=False)):
            values = [(place, figure_of(groups[key])) for place, key in enumerate(keys) if key in groups]
            heights = [(place, height) for place, height in values if height is not None]
            positions = [place + (index - (len(series) - 1) / 2) * width for place, _ in heights]
            bars = ax.bar(positions, [height for _, height in heights], 0.92 * width, color=colour, label=label)
            if len(keys) <= MOST_APART:
                # The value distinguishes a bar of height 0 from a missing bar.
                ax.bar_label(bars, fmt="{:.0%}" if is_part else "{:.3g}", fontsize=7, padding=1)
        ax.set_ylabel(title)
        ax.set_xticks(range(len(keys)), [_size_name(key) for key in keys], rotation=90 if len(keys) > MOST_APART else 0)
        ax.grid(axis="x", visible=False)
        if is_part:
            ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        ax.set_ylim(0, max(1.12 * ax.dataLim.y1, 0.2 if is_part else 1.0))
        ax.set_xlim(-0.6, len(keys) - 0.4)
    for ax in axes[2:]:
        ax.set_xlabel("nodes of the job" + (" × components" if any(key[1] for key in keys) else ""))
    if len(series) > 1:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(series)))
    return figure


Key = tuple[int, int | None]


def _series_by_size(runs: Runs) -> list[tuple[str, dict[Key, list[Json]]]]:
    """Return labelled groups of jobs, one line of the figure each, as jobs by size.

    A single run has a group for each priority; of several runs each is a group.
    """
    series: list[tuple[str, list[Json]]] = []
    for label, report in runs:
        jobs = [job for job in report["jobs"] if job["state"] in ENDED]
        if len(runs) > 1:
            series.append((label, jobs))
        else:
            by_priority = group_jobs(jobs, lambda job: str(job["priority"]))
            series += [(f"{priority} priority", group) for priority, group in by_priority.items()]
    split = len(runs) == 1

    def key(job: Json) -> Key:
        return job["nodes"], job["components"] if split else None

    return [(label, group_jobs(jobs, key)) for label, jobs in series if jobs]


def _size_name(key: Key) -> str:
    nodes, components = key
    return f"{nodes}" if not components else f"{nodes}×{components}"
