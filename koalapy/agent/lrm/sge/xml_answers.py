"""Grid Engine's answers in XML, also where a name in them is such that it is none. Pure.

It writes the bytes of others' names as they are: not all are UTF-8, some are control characters, and some releases
leave ``&`` and ``<`` in them. Wrappers print blank lines before it.
"""

import re
from xml.etree import ElementTree as Xml

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_REFERENCE = re.compile("&#(?:([0-9]+)|x([0-9a-fA-F]+));")
_BARE = re.compile("&(?!(?:#[0-9]+|#x[0-9a-fA-F]+|amp|lt|gt|quot|apos);)")
_NAME = re.compile("<(JB_name|JB_owner)>(.*?)</\\1>", re.DOTALL)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def read_xml(answer: bytes) -> Xml.Element:
    """The root; what may not be in XML is replaced. ``Xml.ParseError`` when it is none all the same."""
    text = _FORBIDDEN.sub(_REPLACEMENT, answer.decode(errors="replace")).lstrip()
    text = _NAME.sub(lambda found: f"<{found[1]}>{found[2].replace('<', '&lt;')}</{found[1]}>", text)
    text = _BARE.sub("&amp;", text)
    return Xml.fromstring(_REFERENCE.sub(_allowed, text))


def _allowed(reference: re.Match[str]) -> str:
    digits = reference[1] or reference[2]
    code = int(digits, 10 if reference[1] else 16) if len(digits) < 20 else -1
    is_allowed = 0 <= code <= 0x10FFFF and not _FORBIDDEN.match(chr(code))
    return reference[0] if is_allowed else _REPLACEMENT
