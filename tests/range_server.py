"""A web server on this machine for a test's files, with the faults that real ones have.

It is a process of its own: GDAL may hold Python's lock while it waits for an answer.
"""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any, Dict, List

# A request that must fail does so at once; one that waits for a server ends after a second.
IMPATIENT = dict(GDAL_HTTP_TIMEOUT='1', GDAL_HTTP_CONNECTTIMEOUT='5', GDAL_HTTP_MAX_RETRY='0')


class RangeServer:
    """Serves the files of a folder, each below the names of faults.

    ``URL/ok/a.tif`` answers as a good server does. ``cut`` has the first half of each file;
    ``stall`` stops answering behind the first 16 kB, ``busy`` says 503 there; ``norange`` knows no
    parts of files; ``plain`` names no ETag and no date; ``private`` asks for a signature of S3.
    """

    def __init__(self, folder: Path) -> None:
        self._log = folder / '.requests'
        self._log.write_text('')
        self._process = subprocess.Popen(
            [sys.executable, '-S', '-E', __file__, str(folder)], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.address = f'127.0.0.1:{int(self._process.stdout.readline())}'
        self.url = f'http://{self.address}'

    def requests(self) -> List[str]:
        """Return the requests until now, each ``METHOD PATH BYTES``."""
        return self._log.read_text().splitlines()

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'  # connections stay open

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, with_body: bool) -> None:
        path = urllib.parse.unquote(self.path.partition('?')[0])
        fault, _, name = path[1:].partition('/')
        file = os.path.join(sys.argv[1], name)
        if not os.path.isfile(file) or fault == 'gone':
            return self._send(404, b'', {}, with_body)
        if fault == 'private' and 'AWS4-HMAC-SHA256' not in self.headers.get('Authorization', ''):
            return self._send(403, b'', {}, with_body)
        with open(file, 'rb') as opened:
            data = opened.read()
        stamp = int(os.stat(file).st_mtime)
        data = data[: len(data) // 2] if fault == 'cut' else data
        found = re.match(r'bytes=(\d+)-(\d*)', self.headers.get('Range') or '')
        start = int(found.group(1)) if found else 0
        if start >= 16384 and fault == 'stall':
            self._note(0)
            time.sleep(600)
        if start >= 16384 and fault == 'busy':
            return self._send(503, b'', {}, with_body)
        known = (
            {}
            if fault == 'plain'
            else {'ETag': f'"{stamp}-{len(data)}"', 'Last-Modified': self.date_time_string(stamp)}
        )
        if not found or fault == 'norange':
            return self._send(200, data, known, with_body)
        if start >= len(data):
            return self._send(416, b'', {'Content-Range': f'bytes */{len(data)}'}, with_body)
        stop = min(int(found.group(2) or len(data)), len(data) - 1)
        known['Content-Range'] = f'bytes {start}-{stop}/{len(data)}'
        return self._send(206, data[start : stop + 1], known, with_body)

    def _note(self, size: int) -> None:
        with open(os.path.join(sys.argv[1], '.requests'), 'a') as log:
            log.write(f'{self.command} {self.path} {size}\n')

    def _send(self, status: int, body: bytes, headers: Dict[str, str], with_body: bool) -> None:
        self._note(len(body) * with_body)
        self.send_response(status)
        for name, value in dict(headers, **{'Content-Length': str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


if __name__ == '__main__':
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), _Handler) as listening:
        listening.daemon_threads = True
        print(listening.server_address[1], flush=True)
        listening.serve_forever()
