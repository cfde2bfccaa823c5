"""What each node of a component must have, and whether the nodes of a class have it.

Also read lists of host names in Slurm's short form, such as ``n[1-3,07],m1``.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import prod
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, Protocol

from koalapy.model.field import Bounds, Length, TextForm
from koalapy.model.wording import format_bytes, format_list

MAX_MEMORY = 2**53
"""Bytes of a node."""
MAX_CORES = 65_536
MAX_GPUS = 1000
MAX_FEATURES = 64
"""Maximum features that a job requires, or that a node class has."""
MAX_EXCLUDED = 1000
MAX_WORD_LENGTH = 100
WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}", re.ASCII)
"""Names of features, partitions, accounts and GPU types, which become words of the resource managers' commands."""
EXCLUDED = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]|\[[0-9]{1,9}(?:[-,][0-9]{1,9}){0,200}\]){0,254}", re.ASCII)
"""A cluster, a node, or nodes in Slurm's short form."""

MAX_EXCLUDED_NODES = 100_000
"""Nodes that all excluded names of a job together may stand for."""

NodeCores = Annotated[int, Bounds(minimum=1, maximum=MAX_CORES, excess_note="more than any node has")]
NodeMemory = Annotated[
    int, Bounds(minimum=1, maximum=MAX_MEMORY, hint="give at least 1 byte"), TextForm("16GB, 512MiB")
]
NodeWord = Annotated[str, Length(MAX_WORD_LENGTH)]
OptionalNodeWord = Annotated[str, Length(MAX_WORD_LENGTH)]
NodeFeatures = Annotated[tuple[NodeWord, ...], Length(MAX_FEATURES)]
ExcludedName = Annotated[str, Length(255)]
Excluded = Annotated[tuple[ExcludedName, ...], Length(MAX_EXCLUDED), TextForm("clusters, nodes, as n[1-3]")]


@dataclass(frozen=True, slots=True)
class Gpus:
    """A number of GPUs of a node, and their type; empty: of any type."""

    count: Annotated[int, Bounds(minimum=1, maximum=MAX_GPUS)]
    type: str = ""

    def __str__(self) -> str:
        return f"{self.type}:{self.count}" if self.type else str(self.count)

    @property
    def description(self) -> str:
        """Return the GPUs as a phrase: ``2 GPUs a100``."""
        return f"{self.count} GPU{'' if self.count == 1 else 's'}{' ' if self.type else ''}{self.type}"


class NodeProperties(Protocol):
    """The properties of all nodes of a class."""

    @property
    def name(self) -> str: ...
    @property
    def memory(self) -> int | None: ...
    @property
    def cores(self) -> int | None: ...
    @property
    def gpus(self) -> Sequence[Gpus]: ...
    @property
    def features(self) -> Sequence[str]: ...
    @property
    def partitions(self) -> Sequence[str]: ...
    @property
    def is_part(self) -> bool:
        """Return whether other jobs use these nodes too, so that only jobs that share nodes may get them."""
        ...

    @property
    def memory_per_core(self) -> int | None:
        """Return the bytes that a job on a part of a node gets with each core if it asks for no memory.

        None: memory is not limited.
        """
        ...


def divide_memory(memory: int | None, cores: int | None) -> int | None:
    """Return the memory that belongs to each core of a node; None if it is not known."""
    return memory // cores if memory and cores and memory >= cores else None


def _is_word_or_empty(text: str) -> bool:
    return not text or WORD.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Check:
    """A constraint of values in messages. ``koala submit`` imports it faster than those of ``annotated_types``."""

    holds: Callable[[Any], bool]

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[object], Any]) -> dict[str, Any]:
        """Return the schema of this constraint. Called by pydantic."""
        function = {"type": "no-info", "function": self._check}
        return {"type": "function-after", "function": function, "schema": handler(source)}

    def _check(self, value: Any) -> Any:
        if not self.holds(value):
            raise ValueError("it is out of its bounds")
        return value


Word = Annotated[str, Check(_is_word_or_empty)]
"""A word on the command line of a resource manager, checked in every message; empty if none is required."""
CheckedGpus = Annotated[Gpus, Check(lambda gpus: 0 <= gpus.count <= MAX_GPUS and _is_word_or_empty(gpus.type))]


@dataclass(frozen=True, slots=True)
class NodeRequirement:
    """What each node of a component must have, the clusters and nodes that are excluded, and who is charged."""

    cores: Annotated[int, Check(lambda cores: 1 <= cores <= MAX_CORES)] | None = None
    memory: Annotated[int, Check(lambda memory: 1 <= memory <= MAX_MEMORY)] | None = None
    """Bytes."""
    gpus: CheckedGpus | None = None
    features: Annotated[tuple[Word, ...], Check(lambda names: len(names) <= 2 * MAX_FEATURES)] = ()
    partition: Word = ""
    """Partition of Slurm, or queue of Grid Engine."""
    exclude: Annotated[
        tuple[Annotated[str, Check(EXCLUDED.fullmatch)], ...], Check(lambda names: len(names) <= 2 * MAX_EXCLUDED)
    ] = ()
    account: Word = ""
    qos: Word = ""
    """Account and quality of service, which the resource manager checks."""
    share: bool = False
    """Whether a part of each node is enough, shared with other jobs. ``cores`` is set then."""

    def __str__(self) -> str:
        """Return the properties as a phrase: ``8 cores, 2 GPUs a100 and feature ib``; empty without any."""
        parts = [f"{self.cores} core{'' if self.cores == 1 else 's'}"] if self.cores else []
        parts += [f"{format_bytes(self.memory)} of memory"] if self.memory else []
        parts += [self.gpus.description] if self.gpus else []
        parts += [f"feature {feature}" for feature in self.features]
        parts += [f"partition {self.partition}"] if self.partition else []
        return " and ".join(filter(None, (format_list(parts[:-1]), *parts[-1:])))

    @property
    def description(self) -> str:
        """Return the whole requirement as text, with the account and the excluded clusters and nodes."""
        charged = [f"{name} {value}" for name, value in (("account", self.account), ("qos", self.qos)) if value]
        excluded = [f"not on {', '.join(self.exclude)}"] if self.exclude else []
        return ", ".join(filter(None, (str(self), *charged, *excluded)))

    @property
    def matching_part(self) -> "NodeRequirement | None":
        """Return what decides which nodes serve; None if all do."""
        part = replace(self, account="", qos="")
        return None if part == NO_REQUIREMENT else part

    @property
    def of_nodes(self) -> "NodeRequirement | None":
        """Return what the nodes must have, without excluded ones; None if all nodes have it."""
        part = replace(self, account="", qos="", exclude=())
        return None if part == NO_REQUIREMENT else part

    def unmet(self, nodes: NodeProperties) -> Iterable[str]:
        """Yield the names of the properties that these nodes do not have. Unknown cores and memory count as enough.

        On a part of a node, a job that asks for no memory needs that of its cores.
        """
        if self.cores is not None and nodes.cores is not None and nodes.cores < self.cores:
            yield "cores"
        memory = self.memory
        if memory is None and nodes.is_part and self.cores is not None and nodes.memory_per_core is not None:
            memory = self.cores * nodes.memory_per_core
        if memory is not None and nodes.memory is not None and nodes.memory < memory:
            yield "memory"
        if self.gpus is not None and count_gpus(nodes.gpus, self.gpus.type) < self.gpus.count:
            yield "gpus"
        if not set(self.features).issubset(nodes.features):
            yield "features"
        if self.partition and self.partition not in nodes.partitions:
            yield "partition"

    def is_met_by(self, nodes: NodeProperties) -> bool:
        return next(iter(self.unmet(nodes)), None) is None


NO_REQUIREMENT = NodeRequirement()


class RequirementSource(Protocol):
    """A job or a component with the fields of a requirement."""

    @property
    def cores(self) -> int | None: ...
    @property
    def memory(self) -> int | None: ...
    @property
    def gpus(self) -> Gpus | None: ...
    @property
    def features(self) -> tuple[str, ...]: ...
    @property
    def partition(self) -> str: ...
    @property
    def exclude(self) -> tuple[str, ...]: ...
    @property
    def account(self) -> str: ...
    @property
    def qos(self) -> str: ...


_REQUIRED = attrgetter("cores", "memory", "gpus", "features", "partition", "exclude", "account", "qos")


def describe_requirements(job: RequirementSource, components: Iterable[RequirementSource]) -> str:
    """Return what a job and its components require of their nodes as text; empty without any requirement."""
    combined, texts = combine_requirements(job, None), list[str]()
    if combined is not None:
        texts.append(combined.description)
    for index, component in enumerate(components):
        if (requirement := combine_requirements(component, None)) is not None:
            texts.append(f"component {index}: {requirement.description}")
    return "; ".join(texts)


def combine_requirements(job: RequirementSource, component: RequirementSource | None) -> NodeRequirement | None:
    """Return the requirement of a component of a job; None if nothing is required.

    The component's values replace those of the job; features and excluded names are added.
    """
    values = _REQUIRED(job)
    if component is not None and (job.features or job.exclude or has_requirement(component)):
        values = (
            component.cores or job.cores,
            component.memory or job.memory,
            component.gpus or job.gpus,
            tuple(dict.fromkeys((*job.features, *component.features))),
            component.partition or job.partition,
            tuple(dict.fromkeys((*job.exclude, *component.exclude))),
            component.account or job.account,
            component.qos or job.qos,
        )
    return NodeRequirement(*values) if any(values) else None


def has_requirement(source: RequirementSource) -> bool:
    return any(_REQUIRED(source))


def count_gpus(gpus: Sequence[Gpus], gpu_type: str) -> int:
    """Return the number of GPUs of a type; of all types if it is empty."""
    return sum(entry.count for entry in gpus if not gpu_type or entry.type == gpu_type)


class NodeFilter(NamedTuple):
    """The nodes of a cluster that a component may get: those of a class, or those with the required properties."""

    node_class: str = ""
    """Empty: any class."""
    requirement: NodeRequirement | None = None

    @property
    def admits_all(self) -> bool:
        return not self.node_class and self.requirement is None

    def admits(self, nodes: NodeProperties) -> bool:
        """Return whether the component may get nodes of this class."""
        if self.node_class and nodes.name != self.node_class:
            return False
        if nodes.is_part and not self.shares:
            return False
        return self.requirement is None or self.requirement.is_met_by(nodes)

    @property
    def shares(self) -> bool:
        """Return whether the component accepts a part of each node."""
        return self.requirement is not None and self.requirement.share

    def __str__(self) -> str:
        """Return the nodes as text to append: ``of the class fast``, ``with 2 GPUs``; empty for any node."""
        if self.node_class:
            return f"of the class {self.node_class}"
        properties = str(self.requirement or "")
        return f"with {properties}" if properties else ""


ANY_NODE = NodeFilter()


def parse_gpus(text: str) -> Gpus:
    """Return the GPUs of a text such as ``2`` or ``a100:2``. Raise ``ValueError`` for other text."""
    gpu_type, _, count = text.strip().rpartition(":")
    if not re.fullmatch(r"[0-9]{1,9}", count, re.ASCII) or (":" in text and not WORD.fullmatch(gpu_type)):
        raise ValueError("give a number of GPUs, or their type and number: 2, a100:2")
    return Gpus(int(count), gpu_type)


MAX_HOSTS = 100_000
"""Maximum number of names that a list is expanded to."""
_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]+\])+")
_LIST = re.compile(rf"{_NAME.pattern}(?:,{_NAME.pattern})*")
_PART = re.compile(r"\[([^\[\]]+)\]|([^\[\]]+)")
_NUMBERED = re.compile(r"(.+?)([0-9]{0,9})", re.DOTALL)
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
Ranges = list[tuple[str, range]]
"""Ranges of numbers, each with its first number as written, which sets the width."""


def expand_host_list(text: str) -> list[str]:
    """Return all names of a list. Raise ``ValueError`` for other text, and for more than ``MAX_HOSTS`` names."""
    if count_hosts(text) > MAX_HOSTS:
        raise _not_a_list(text)
    return ["".join(parts) for name in _parse_names(text) for parts in product(*map(_list_texts, name))]


def count_hosts(text: str) -> int:
    """Return the number of names that a list denotes. Raise ``ValueError`` for other text."""
    return sum(prod(map(_count_texts, name)) for name in _parse_names(text))


def compress_host_list(names: Iterable[str]) -> str:
    """Return names as a list in which numbers at the ends of names are joined to ranges, as ``n[1-3],m1``."""
    matches = (_NUMBERED.fullmatch(name) for name in names)
    parts = sorted((match[1], len(match[2]), match[2]) for match in matches if match)
    texts = []
    for _, group in groupby(enumerate(parts), lambda item: (*item[1][:2], int(item[1][2] or 0) - item[0])):
        run = [part for _, part in group]
        prefix, _, first = run[0]
        texts.append(f"{prefix}{first}" if len(run) == 1 else f"{prefix}[{first}-{run[-1][2]}]")
    return ",".join(texts)


def _parse_names(text: str) -> Iterator[list[str | Ranges]]:
    """Yield each name of a list as its parts: plain text, or ranges of numbers. Raise ``ValueError``."""
    if not text:
        return
    if not _LIST.fullmatch(text):
        raise _not_a_list(text)
    for name in _NAME.findall(text):
        yield [_parse_ranges(numbers) if numbers else plain for numbers, plain in _PART.findall(name)]


def _parse_ranges(text: str) -> Ranges:
    ranges: Ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _not_a_list(text)
        ranges.append((match[1], range(int(match[1]), int(match[2] or match[1]) + 1)))
    return ranges


def _count_texts(part: str | Ranges) -> int:
    return 1 if isinstance(part, str) else sum(numbers.stop - numbers.start for _, numbers in part)


def _list_texts(part: str | Ranges) -> list[str]:
    if isinstance(part, str):
        return [part]
    return [str(number).zfill(len(first)) for first, numbers in part for number in numbers]


def _not_a_list(text: str) -> ValueError:
    return ValueError(f"{text[:80]!r} is not a list of host names")
