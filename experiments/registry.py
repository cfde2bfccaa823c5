"""Find experiments by name."""

from functools import cache
from importlib import import_module

from experiments.experiment import Experiment
from koalapy.model.errors import NotFoundError

MODULES = ("mohamed_2005", "huang_2007", "lerida_2008", "sonmez_2010", "beyond_traces", "scheduling_with_time")
"""Modules of this package, one for each paper."""


@cache
def load_experiments() -> dict[str, Experiment]:
    """Return all experiments by name, in the order of the papers."""
    by_name: dict[str, Experiment] = {}
    for module in MODULES:
        for experiment in import_module(f"experiments.{module}").EXPERIMENTS:
            assert experiment.name not in by_name, f"two experiments are named {experiment.name}"
            by_name[experiment.name] = experiment
    return by_name


def find_experiment(name: str) -> Experiment:
    """Return an experiment; raise ``NotFoundError`` if there is none of this name."""
    try:
        return load_experiments()[name]
    except KeyError:
        hint = "see python -m experiments list"
        raise NotFoundError(f"there is no experiment {name!r}", field="NAME", value=name, hint=hint) from None
