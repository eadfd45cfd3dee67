"""Maps in a browser: a page, the files that it reads in byte ranges, and a small server.

`catalog.py` finds the maps and their files, `session.py` prepares them for a browser, and
`server.py` serves them to one user on this machine; `static.py` writes a folder for any web server
instead. The page is in ``web/``. A review (`review.py`) lets the user judge tiles, worst first.
"""

from mapsage_launcher.only_help import is_only_help

# The help of a program needs none of these.
if not is_only_help():
    from .catalog import MapEntry, find_maps
    from .display import TruthSettings
    from .errors import ViewError
    from .labeling import Labeling
    from .review import Review
    from .server import ViewServer
    from .session import ViewSession
    from .static import write_static

__all__ = [
    'Labeling',
    'MapEntry',
    'Review',
    'TruthSettings',
    'ViewError',
    'ViewServer',
    'ViewSession',
    'find_maps',
    'write_static',
]
