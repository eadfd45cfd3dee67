"""Import mmseg's datasets without its word about an optional package.

Gap: onedl-mmsegmentation 1.4.2 prints "Could not import OneDL" twice per process at import: it logs
at DEBUG level to no logger, which MMEngine prints. Eight ranks make sixteen lines of it.
Remove when: onedl-mmsegmentation imports silently.
"""
from __future__ import annotations

import contextlib
import io


def apply() -> bool:
    """Import ``mmseg.datasets``, with standard output held back."""
    with contextlib.redirect_stdout(io.StringIO()):
        import mmseg.datasets  # noqa: F401
    return True
