"""What ``qhost -xml`` says, as plain values. Pure: bytes in, values out."""

import re
from xml.etree import ElementTree as Xml

from koalapy.agent.lrm.sge.xml_answers import read_xml

_UNITS = {"": 1, "k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30, "t": 10**12, "T": 1 << 40}
"""As Grid Engine has them: small letters are decimal."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)B?")


def read_size(text: str) -> int | None:
    """Return the bytes of a size as Grid Engine prints it, as ``1.2G``; None for any other text."""
    size = _SIZE.fullmatch(text.strip())
    return None if size is None else int(float(size[1]) * _UNITS[size[2]])


def short(host: str) -> str:
    """A host's name without its domain: it is told with or without."""
    return host.partition(".")[0]


def read_memory(text: bytes) -> dict[str, int]:
    """Bytes of each host of which they are told, by its short name; none for what is no answer."""
    try:
        root = read_xml(text)
    except Xml.ParseError:
        return {}
    found = {}
    for host in root.iter("host"):
        for value in host.findall("hostvalue"):
            if value.get("name") == "mem_total" and (memory := read_size(value.text or "")):
                found[short(host.get("name", ""))] = memory
    return found
