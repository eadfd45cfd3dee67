"""Any text as one that XML and HTML can hold."""
from __future__ import annotations

import re

# Characters that XML 1.0 has no place for, not even escaped.
_NOT_XML = re.compile('[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]')


def xml_text(value: object) -> str:
    """Return a value as text in which U+FFFD stands for what XML cannot hold; it is not escaped."""
    return _NOT_XML.sub('\ufffd', str(value))
