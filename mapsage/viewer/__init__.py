"""Maps in a browser: a page, the files that it reads in parts, and a small server."""
from .catalog import MapEntry, find_maps
from .display import TruthSettings
from .errors import ViewError
from .review import Review
from .server import ViewServer
from .session import ViewSession
from .static import write_static

__all__ = [
    'MapEntry', 'Review', 'TruthSettings', 'ViewError', 'ViewServer', 'ViewSession', 'find_maps',
    'write_static']
