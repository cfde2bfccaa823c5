"""Read a cluster's ``native_specification``, and reject options that take jobs out of the agent's sight. Pure."""

import shlex
from collections.abc import Mapping, Sequence

from koalapy.model.errors import SiteFault, SiteRejected

_OTHER_CLUSTERS = "leave it out: configure each Slurm cluster as a cluster of its own, with its own agent"
_SBATCH: Mapping[str, str] = {
    "clusters": _OTHER_CLUSTERS,
    "cluster-constraint": _OTHER_CLUSTERS,
    "array": "leave it out: a component is one job of Slurm",
    "job-name": "leave it out: the agent finds its jobs by their names",
    "test-only": "leave it out: no job would run",
    "wait": "leave it out: the agent does not wait for the end of a job",
}
"""Long options of sbatch, and what to do instead."""
_SBATCH_SHORT = {"M": "clusters", "a": "array", "J": "job-name", "W": "wait", "p": "partition"}
_SBATCH_FLAGS = "hHIkOQsvVX"
"""Short options of sbatch without a value: another may follow in the same word."""
_QSUB: Mapping[str, str] = {
    "-@": "write the options of that file here",
    "-N": "leave it out: the agent finds its jobs by their names",
    "-sync": "leave it out: the agent does not wait for the end of a job",
    "-t": "leave it out: a component is one job of Grid Engine",
    "-verify": "leave it out: no job would run",
}


def split_options(text: str) -> Sequence[str]:
    """Split options of the configuration as a shell does. Raise ``SiteRejected`` for unclosed quotes."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SiteRejected(f"native_specification {text!r}: {error}", fault=SiteFault.SITE) from error


def reject_sbatch_options(words: Sequence[str], *, short: bool = True, **refused: str) -> None:
    """Raise ``SiteRejected`` for an option of sbatch that moves, multiplies or renames jobs.

    ``refused`` are further long options, with what to do instead. ``short`` says whether one letter is an option of
    sbatch's too, which it is not where the words may be those of another resource manager.
    """
    table = {**_SBATCH, **refused}
    for word in words:
        if word.startswith("--"):
            # sbatch knows an option by the beginning of its name, too.
            begin = word[2:].partition("=")[0]
            name = next((each for each in table if begin and each.startswith(begin)), "")
        elif word.startswith("-") and short:
            letters = word[1:].lstrip(_SBATCH_FLAGS)
            name = _SBATCH_SHORT.get(letters[:1], "")
        else:
            name = ""
        if name in table:
            _reject(word, table[name])


def reject_qsub_options(words: Sequence[str], **refused: str) -> None:
    """Raise ``SiteRejected`` for an option of qsub that moves, multiplies or renames jobs; ``refused`` as above."""
    table = {**_QSUB, **{f"-{name}": remedy for name, remedy in refused.items()}}
    for word in words:
        if word in table:
            _reject(word, table[word])


def _reject(word: str, remedy: str) -> None:
    raise SiteRejected(
        f"native_specification has {word}, with which the agent loses sight of its jobs",
        field="native_specification",
        value=word,
        hint=remedy,
        fault=SiteFault.SITE,
    )
