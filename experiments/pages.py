"""Write the report: one page per paper with tables, plots and provenance, and an index."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.papers import PAPERS
from experiments.runs import Outcome
from experiments.tables import count_repetitions, format_table
from koalapy.model.errors import UsageError
from koalapy.model.wording import format_duration

INDEX = "README.md"
HOW = """`python -m experiments list` names all experiments, and `python -m experiments run NAME…` runs some of them
again. `make experiments` runs all of them and writes these pages. An experiment consists of *cells*: independent
simulations that run in several processes, or as [an MPI job over the clusters of the
grid](../../docs/cli.md#experiments). A cell gives the same numbers in every process and on every machine, because its
seed determines all random numbers. `results/` has one Parquet file for each experiment, with the parameters, seed and
processor time of each cell. Its metadata says what made the results: versions, the SHA-256 of each trace, and that of
the source of every imported module. When one of these changes, the whole experiment is run again. Runs on real
clusters have [pages of their own](live/README.md).

In tables, *ours* is the mean over all seeds. The interval contains the mean over all possible seeds with a
probability of 95 % (Student). An experiment without an interval uses no random numbers."""
"""Text of the index page."""
WARNING = "<!-- written by python -m experiments report: change the experiment, and not this page -->"


def format_section(outcome: Outcome, plot: str = "") -> str:
    """Return the section of one experiment; ``plot`` is the file name of its picture."""
    experiment, stored = outcome.experiment, outcome.stored
    assert stored is not None
    parts = [f"## {experiment.name}", f"{experiment.title[:1].upper()}{experiment.title[1:]}."]
    parts.append(format_table(experiment.build_rows(stored.results), experiment.unit))
    if plot:
        parts.append(f"![{experiment.title}]({plot})")
    if remarks := experiment.write_remarks(stored.results):
        parts.append(remarks)
    parts.append(_format_provenance(outcome))
    return "\n\n".join(parts)


def _format_provenance(outcome: Outcome) -> str:
    stored = outcome.stored
    assert stored is not None
    seconds = format_duration(sum(result.seconds for result in stored.results))
    cells, count = len(stored.results), count_repetitions(outcome)
    facts = [
        f"{count} repetitions, {cells} simulations" if count > 1 else f"{cells} simulation{'s' if cells > 1 else ''}"
    ]
    facts += [
        f"{seconds} of processor time",
        f"koalapy {stored.made_by.koalapy}",
        f"source {stored.made_by.source[:12]}",
    ]
    facts += [f"trace {name} (SHA-256 {sha[:12]})" for name, sha in stored.made_by.traces.items()]
    return f"*Made by `python -m experiments run {outcome.experiment.name}`: {', '.join(facts)}.*"


def write_pages(folder: Path, outcomes: Sequence[Outcome]) -> list[Path]:
    """Write an index and a page per paper with results; return the paths. Raise ``UsageError`` on failure."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [_write_page(folder, paper, of_paper) for paper, of_paper in group_by_paper(outcomes)]
        index = folder / INDEX
        index.write_text(_format_index(outcomes), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}", field="-o", hint="give another") from error
    return [*written, index]


def group_by_paper(outcomes: Iterable[Outcome]) -> Iterable[tuple[str, list[Outcome]]]:
    """Group the experiments with results by paper."""
    papers: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.stored is not None:
            papers.setdefault(outcome.experiment.paper, []).append(outcome)
    return papers.items()


def _write_page(folder: Path, paper: str, outcomes: Sequence[Outcome]) -> Path:
    parts = [f"# {paper}", WARNING, f"{PAPERS[paper]}."]
    parts.append("Made again by the production scheduler in the simulated world.")
    parts += [format_section(outcome, _draw_figure(folder, outcome)) for outcome in outcomes]
    path = folder / f"{paper}.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def _draw_figure(folder: Path, outcome: Outcome) -> str:
    """Draw the picture of an experiment and return its file name, or "" if it has none."""
    import matplotlib as mpl

    from experiments.plots import STYLE

    assert outcome.stored is not None
    with mpl.rc_context({**STYLE, "svg.fonttype": "none"}):
        figure = outcome.experiment.draw_figure(outcome.stored.results)
        if figure is None:
            return ""
        name = f"{outcome.experiment.name}.svg"
        figure.savefig(folder / name, metadata={"Date": None})
    return name


def _format_index(outcomes: Sequence[Outcome]) -> str:
    parts = [
        "# The papers' experiments",
        WARNING,
        "What the papers measured, made again by the same scheduler that places users' jobs, in a simulated world.",
        HOW,
    ]
    for paper, of_paper in group_by_paper(outcomes):
        lines = [
            f"- [{outcome.experiment.name}]({paper}.md#{outcome.experiment.name}): {outcome.experiment.title}"
            for outcome in of_paper
        ]
        parts += [f"## [{paper}]({paper}.md)", f"{PAPERS[paper]}.", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"
