"""A local S3 server (moto) behind a front with the faults of a distant one.

The front is a process of its own: GDAL may hold Python's lock while it waits for an answer.
"""

from __future__ import annotations

import http.client
import http.server
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict


class S3Server:
    """The server and its front. ``fault`` is one of '', 'slow', 'busy', 'cut', 'read-only'."""

    def __init__(self, folder: Path) -> None:
        # The front, which this file is too, shall start without PyTorch.
        from ranks import free_port

        self._store, front = free_port(), free_port()
        self._fault = folder / 'fault'
        self._fault.write_text('')
        self._processes = [
            subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=str(folder)
            )
            for command in (
                [sys.executable, '-m', 'moto.server', '-H', '127.0.0.1', '-p', str(self._store)],
                [sys.executable, __file__, str(front), str(self._store), str(self._fault)],
            )
        ]
        for port in (self._store, front):
            _await_port(port)
        self.environ: Dict[str, str] = dict(
            AWS_ACCESS_KEY_ID='test',
            AWS_SECRET_ACCESS_KEY='test',
            AWS_S3_ENDPOINT=f'127.0.0.1:{front}',
            AWS_HTTPS='NO',
            AWS_VIRTUAL_HOSTING='FALSE',
            AWS_DEFAULT_REGION='us-east-1',
            AWS_EC2_METADATA_DISABLED='true',
        )

    def client(self) -> Any:
        """Return boto3's client of the server, past the front."""
        import boto3

        return boto3.client(
            's3',
            endpoint_url=f'http://127.0.0.1:{self._store}',
            aws_access_key_id='test',
            aws_secret_access_key='test',
            region_name='us-east-1',
        )

    def set_fault(self, fault: str) -> None:
        """Let the front answer with a fault from now on."""
        self._fault.write_text(fault)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _await_port(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(('127.0.0.1', port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f'nothing listens at port {port}'
            time.sleep(0.1)


class _Front(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    store, fault_file, count = 0, '', 0

    def log_message(self, *arguments: Any) -> None:
        pass

    def _pass_on(self) -> None:
        _Front.count += 1
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        fault = Path(self.fault_file).read_text()
        writes = self.command in ('PUT', 'POST', 'DELETE')
        if fault == 'slow':
            time.sleep(0.2)
        if (fault == 'busy' and self.count % 3 == 0) or (fault == 'read-only' and writes):
            self._answer(503 if fault == 'busy' else 403, {}, b'')
            return
        store = http.client.HTTPConnection('127.0.0.1', self.store)
        store.request(self.command, self.path, body, dict(self.headers.items()))
        answer = store.getresponse()
        content = answer.read()
        headers = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ('connection', 'transfer-encoding', 'content-length')
        }
        length = answer.getheader('Content-Length', str(len(content)))
        is_cut = fault == 'cut' and self.command == 'GET' and len(content) > 4096
        self._answer(answer.status, dict(headers, **{'Content-Length': length}), content, is_cut)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

    def _answer(
        self, status: int, headers: Dict[str, str], content: bytes, is_cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {'Content-Length': str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content[: len(content) // 2] if is_cut else content)
        if is_cut:
            self.close_connection = True


if __name__ == '__main__':
    _Front.store, _Front.fault_file = int(sys.argv[2]), sys.argv[3]
    os.environ.pop('http_proxy', None)
    http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), _Front).serve_forever()
