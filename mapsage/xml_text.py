"""Any text as one that XML and HTML can hold."""
from __future__ import annotations

import re

# Characters that XML 1.0 has no place for, not even escaped; and the carriage return, which readers
# take for an end of line unless a writer escapes it (ElementTree does so from Python 3.9 on).
_NOT_XML = re.compile('[^\t\n\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]')


def xml_text(value: object) -> str:
    """Return a value as text in which U+FFFD stands for what XML cannot hold; it is not escaped."""
    return _NOT_XML.sub('\ufffd', str(value))
