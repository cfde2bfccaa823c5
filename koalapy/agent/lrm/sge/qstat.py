"""What ``qstat -f -g t -xml`` says, as plain values. Pure: bytes in, values out."""

from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree as Xml

from koalapy.agent.lrm.port import JOB_PREFIX
from koalapy.agent.lrm.sge.states import BROKEN
from koalapy.agent.lrm.sge.xml_answers import read_xml
from koalapy.model.errors import SiteUnavailable


@dataclass(frozen=True, slots=True)
class QueueInstance:
    """A queue on one host; ``states`` are letters, none when all is well."""

    queue: str
    host: str
    states: str
    used: int
    reserved: int
    total: int


@dataclass(frozen=True, slots=True)
class SgeJob:
    """One job; ``hosts`` are those where it has slots, the one where it was started first."""

    id: str
    name: str
    owner: str
    state: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """One answer."""

    instances: tuple[QueueInstance, ...]
    jobs: tuple[SgeJob, ...]


def read_listing(text: bytes) -> Listing:
    """Read an answer; ``SiteUnavailable`` in one line when it is none."""
    try:
        root = read_xml(text)
    except Xml.ParseError as error:
        raise SiteUnavailable(f"qstat's answer is no XML: {_begin_of(text)} ({error})") from error
    if root.tag != "job_info" or root.find("queue_info") is None or root.find("job_info") is None:
        raise SiteUnavailable(f"qstat's answer is not about queues and jobs: {_begin_of(text)}")
    instances = (_instance(each) for each in root.findall("./queue_info/Queue-List"))
    named = {(each.queue, each.host): each for each in instances if each is not None}
    return Listing(tuple(named.values()), tuple(_jobs(root)))


def _instance(element: Xml.Element) -> QueueInstance | None:
    """Return a queue on one host: out of order if its numbers are none, and None if it has no name."""
    queue, _, host = _text(element, "name").partition("@")
    if not queue or not host:
        return None
    used, reserved, total = (_number(element, name) for name in ("slots_used", "slots_resv", "slots_total"))
    if used is None or reserved is None or total is None:
        return QueueInstance(queue, host, BROKEN, used or 0, reserved or 0, total or 0)
    return QueueInstance(queue, host, _text(element, "state"), used, reserved, total)


def _jobs(root: Xml.Element) -> Iterator[SgeJob]:
    """Each job once; where it has several slots there are as many rows."""
    rows: dict[str, list[tuple[Xml.Element, str]]] = {}
    for row, host in _rows(root):
        rows.setdefault(_text(row, "JB_job_number"), []).append((row, host))
    for id, found in rows.items():
        if not id.isdecimal():
            if any(_text(row, "JB_name").startswith(JOB_PREFIX) for row, _ in found):
                raise SiteUnavailable(f"qstat shows a job of ours without a number: {id!r}")
            continue
        # The host where it was started is told of once as MASTER, and again as one of the others.
        found.sort(key=lambda each: _text(each[0], "master") != "MASTER")
        first = found[0][0]
        hosts = dict.fromkeys(host for _, host in found if host)
        yield SgeJob(id, _text(first, "JB_name"), _text(first, "JB_owner"), _text(first, "state"), tuple(hosts))


def _rows(root: Xml.Element) -> Iterator[tuple[Xml.Element, str]]:
    for queue in root.findall("./queue_info/Queue-List"):
        host = _text(queue, "name").partition("@")[2]
        for row in queue.findall("job_list"):
            yield row, host
    for row in (*root.findall("./queue_info/job_list"), *root.findall("./job_info/job_list")):
        yield row, _text(row, "queue_name").partition("@")[2]


def _text(element: Xml.Element, name: str) -> str:
    return (element.findtext(name) or "").strip()


def _number(element: Xml.Element, name: str) -> int | None:
    """Return a count, and None for a text that is none."""
    try:
        return max(0, int(_text(element, name) or "0"))
    except ValueError:
        return None


def _begin_of(text: bytes) -> str:
    return repr(" ".join(text[:200].decode(errors="replace").split())[:80])
