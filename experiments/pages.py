"""Write the report: one page per paper with tables, plots and provenance, and an index."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.papers import PAPERS
from experiments.runs import Outcome
from experiments.tables import repetitions, table
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


def section(outcome: Outcome, plot: str = "") -> str:
    """Return the section of one experiment; ``plot`` is the file name of its picture."""
    experiment, kept = outcome.experiment, outcome.kept
    assert kept is not None
    parts = [f"## {experiment.name}", f"{experiment.title[:1].upper()}{experiment.title[1:]}."]
    parts.append(table(experiment.rows(kept.results), experiment.unit))
    if plot:
        parts.append(f"![{experiment.title}]({plot})")
    if remarks := experiment.remarks(kept.results):
        parts.append(remarks)
    parts.append(_how(outcome))
    return "\n\n".join(parts)


def _how(outcome: Outcome) -> str:
    kept = outcome.kept
    assert kept is not None
    seconds = format_duration(sum(result.seconds for result in kept.results))
    cells, count = len(kept.results), repetitions(outcome)
    made = [
        f"{count} repetitions, {cells} simulations" if count > 1 else f"{cells} simulation{'s' if cells > 1 else ''}"
    ]
    made += [f"{seconds} of processor time", f"koalapy {kept.made_by.koalapy}", f"source {kept.made_by.source[:12]}"]
    made += [f"trace {name} (SHA-256 {sha[:12]})" for name, sha in kept.made_by.traces.items()]
    return f"*Made by `python -m experiments run {outcome.experiment.name}`: {', '.join(made)}.*"


def write(folder: Path, outcomes: Sequence[Outcome]) -> list[Path]:
    """Write an index and a page per paper with results; return the paths. Raise ``UsageError`` on failure."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [_page(folder, paper, of) for paper, of in by_paper(outcomes)]
        index = folder / INDEX
        index.write_text(_index(outcomes), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}", field="-o", hint="give another") from error
    return [*written, index]


def by_paper(outcomes: Iterable[Outcome]) -> Iterable[tuple[str, list[Outcome]]]:
    """Group the experiments with results by paper."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.kept is not None:
            found.setdefault(outcome.experiment.paper, []).append(outcome)
    return found.items()


def _page(folder: Path, paper: str, outcomes: Sequence[Outcome]) -> Path:
    parts = [f"# {paper}", WARNING, f"{PAPERS[paper]}."]
    parts.append("Made again by the production scheduler in the simulated world.")
    parts += [section(outcome, _draw(folder, outcome)) for outcome in outcomes]
    path = folder / f"{paper}.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def _draw(folder: Path, outcome: Outcome) -> str:
    """Draw the picture of an experiment and return its file name, or "" if it has none."""
    import matplotlib as mpl

    from koalapy.workload.plots import STYLE

    assert outcome.kept is not None
    with mpl.rc_context({**STYLE, "svg.fonttype": "none"}):
        figure = outcome.experiment.figure(outcome.kept.results)
        if figure is None:
            return ""
        name = f"{outcome.experiment.name}.svg"
        figure.savefig(folder / name, metadata={"Date": None})
    return name


def _index(outcomes: Sequence[Outcome]) -> str:
    parts = [
        "# The papers' experiments",
        WARNING,
        "What the papers measured, made again by the same scheduler that places users' jobs, in a simulated world.",
        HOW,
    ]
    for paper, of in by_paper(outcomes):
        lines = [
            f"- [{outcome.experiment.name}]({paper}.md#{outcome.experiment.name}): {outcome.experiment.title}"
            for outcome in of
        ]
        parts += [f"## [{paper}]({paper}.md)", f"{PAPERS[paper]}.", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"
