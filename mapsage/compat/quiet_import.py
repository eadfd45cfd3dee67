"""Import mmseg's datasets without its message about an optional package.

Gap: onedl-mmsegmentation 1.4.2 prints "Could not import OneDL" twice per process at import, sixteen
lines for eight ranks. It logs the message at DEBUG level without a logger, and MMEngine prints such
messages.
Remove when: onedl-mmsegmentation can be imported silently.
"""

from __future__ import annotations

import contextlib
import io


def apply() -> bool:
    """Import ``mmseg.datasets`` with standard output suppressed."""
    with contextlib.redirect_stdout(io.StringIO()):
        import mmseg.datasets  # noqa: F401
    return True
