"""Text for XML and HTML, without the characters that they cannot contain."""

from __future__ import annotations

import re

# Characters that XML 1.0 cannot contain, not even escaped; and the carriage return, which readers
# turn into a line feed unless the writer escapes it (ElementTree does so from Python 3.9 on).
_NOT_XML = re.compile('[^\t\n\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]')


def xml_text(value: object) -> str:
    """Return a value as text, with U+FFFD for characters that XML cannot contain; not escaped."""
    return _NOT_XML.sub('\ufffd', str(value))
