"""Record which test executes which lines of the core, in every process that a test starts.

drawn.py copies this file as ``sitecustomize.py`` into the folder of tests of its copy. Python imports it
at the start of each process whose PYTHONPATH has that folder. A process appends to a file of its own:
``T`` and the test, ``F`` and the source, then line numbers. A fork starts a new file, so that what the
process before it had executed is recorded for the test of the fork too. pytest loads it as a plugin
too, because a trace function ends with the first error that passes through it.
"""

import os
import sys
import threading

FOLDER = os.environ.get('MAPSAGE_COVERED_LINES')
# Of the copy, with a separator at their ends.
CORE = tuple(os.environ.get('MAPSAGE_CORE', 'nowhere').split(os.pathsep))
EXTRAS = os.path.join(CORE[0], 'extras', '')
_TEST = b'PYTEST_CURRENT_TEST'


class Recorder:
    """The trace function of a process; knows which lines its present test has not executed yet."""

    def __init__(self):
        self.start_file()

    def start_file(self):
        self._file = self._test = None
        self._unwritten = b''

    def write(self, text):
        self._unwritten += text
        try:  # a test may close all files, or let the process write none
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError:
            pass

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(CORE) or code.co_filename.startswith(EXTRAS):
            return None
        # not os.environ.get, which decodes at every call
        test = os.environ._data.get(_TEST, b'')
        if test != self._test:
            self._test, self._left, self._source = test, {}, None
            if self._file is None:
                name = f'{os.getpid()}-{os.urandom(4).hex()}'
                self._file = open(os.path.join(FOLDER, name), 'ab', buffering=0)
            self.write(b'T' + test + b'\n')
        left = self._left.get(code)
        if left is None:
            left = self._left[code] = {line for _, _, line in code.co_lines() if line}
        if not left:
            return None

        def on_line(frame, event, arg):
            if event == 'line' and frame.f_lineno in left:
                left.discard(frame.f_lineno)
                text = b'%d\n' % frame.f_lineno
                if self._source != code.co_filename:
                    self._source = code.co_filename
                    text = b'F' + self._source.encode() + b'\n' + text
                self.write(text)
            return on_line

        return on_line


def pytest_runtest_call():
    """Trace each test, whatever an earlier one has done to the trace function."""
    if FOLDER:
        sys.settrace(recorder)


if FOLDER:
    recorder = Recorder()
    os.register_at_fork(after_in_child=recorder.start_file)
    threading.settrace(recorder)
    sys.settrace(recorder)
