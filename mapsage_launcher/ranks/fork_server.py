"""Start Python scripts as forks of one process that has done their imports.

Importing torch, MMEngine and MMSegmentation costs each rank seconds of processor time. Three kinds
of processes do this work once for all ranks:

- The owner is tools/launch.py or a test session. It starts the server through rank_start.py.
- The server is ``fork_server.py --serve``. It imports the modules that its owner names, then forks
  for each request.
- A caller is ``fork_server.py --call``. It is started instead of the script. It sends its
  arguments, environment, folder and open files to the server, passes signals on to the fork, and
  ends with the status of the fork.

A rank that is not forked starts as ``fork_server.py --become``, which ties it to the launcher
before its imports, and becomes the rank's command.

The kernel kills the server when its owner dies, and a fork when the server dies. The server kills a
fork whose caller is gone. Nothing therefore outlives the owner, however it ends. Linux only.

This file is run by its path and imports only the standard library, to start in milliseconds.
"""

from __future__ import annotations

import array
import gc
import io
import json
import os
import selectors
import signal
import socket
import struct
import sys
from typing import Any, Dict, List, NoReturn, Optional, Sequence

_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_STARTED = b'started'
_SECONDS_TO_READ_A_REQUEST = 30


def freeze_imports() -> None:
    """Exclude all objects that exist now from garbage collection.

    MMEngine collects garbage whenever it serializes a dataset, and visits the 338,000 objects of
    the imported modules each time. Imported modules stay until the process ends, so this finds
    nothing. In a fork, freezing also keeps the collector from writing to the memory that is shared
    with the server, which would copy it.
    """
    gc.freeze()


def _die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent, of pid ``parent``, dies."""
    import ctypes

    PR_SET_PDEATHSIG = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


# --- the caller


def _call(address: str, parent: int, arguments: List[str]) -> NoReturn:
    # The server's streams are unbuffered already.
    while arguments and arguments[0] == '-u':
        arguments = arguments[1:]
    # Without a script there is nothing to fork.
    if not arguments or arguments[0].startswith('-'):
        os.execv(sys.executable, [sys.executable, *arguments])
    _die_with_parent(parent)
    ignored = [number for number in _PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
    if signal.SIGINT not in ignored:
        # Until there is a fork to pass the signal on to, it ends the caller.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    request = json.dumps(
        dict(arguments=arguments, folder=os.getcwd(), environ=dict(os.environ), ignored=ignored)
    ).encode()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f'\0{address}')
        # The name is free once the server has died, and the request has the environment.
        _, user, _ = struct.unpack(
            '3i', connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        if user != os.getuid():
            _lost_fork()
        connection.sendmsg(
            [struct.pack('<q', len(request))],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0, 1, 2]))],
        )
        connection.sendall(request)
        answer = connection.recv(len(_STARTED))
    except OSError:
        answer = b''
    if answer != _STARTED:
        refusal = (answer + _read_all(connection)).decode()
        connection.close()
        _start_new_python(refusal, arguments) if refusal else _lost_fork()
    for number in _PASSED_ON:
        if number not in ignored:
            signal.signal(number, lambda number, _: _pass_signal(connection, number))
    status = _read_all(connection)
    if not status:
        _lost_fork()
    _end_as(struct.unpack('<q', status)[0])


def _pass_signal(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(bytes([number]))
    except OSError:
        # The fork has ended. This runs in a signal handler, so an error would interrupt the read of
        # the fork's status.
        pass


def _read_all(connection: socket.socket) -> bytes:
    data = b''
    while True:
        try:
            chunk = connection.recv(4096)
        except OSError:
            chunk = b''
        if not chunk:
            return data
        data += chunk


def _become_command(parent: int, command: List[str]) -> NoReturn:
    """Become ``command``, which the kernel kills when the process of pid ``parent`` dies."""
    _die_with_parent(parent)
    os.execvp(command[0], command)


def _start_new_python(refusal: str, arguments: List[str]) -> NoReturn:
    """Become a new Python that runs the script, because the server refuses to fork."""
    sys.stderr.write(f'{refusal}\nthis rank starts as a new Python process\n')
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, '-u', *arguments])


def _lost_fork() -> NoReturn:
    """End like a killed rank, because the server or the fork was killed."""
    sys.stderr.write('the process that this rank was forked from has died\n')
    sys.stderr.flush()
    _end_as(-signal.SIGKILL)


def _end_as(status: int) -> NoReturn:
    """End with an exit status. A negative status is the number of a signal to end by, negated."""
    if status < 0:
        import resource

        # The fork has already written a core file.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
        signal.pause()
    os._exit(status)


# --- the server


class _Server:
    """Forks this process for every caller and reports the status of each fork to its caller.

    Args:
        listener: Listening Unix socket.
        refusal: Reason why this process cannot fork, for the callers; empty if it can.
        imported: Environment variables that the imports have set.
    """

    def __init__(self, listener: socket.socket, refusal: str, imported: Dict[str, str]) -> None:
        self._listener, self._refusal, self._imported = listener, refusal, imported
        self._omp_threads = os.environ.get('OMP_NUM_THREADS')
        # Connection to a caller -> pid of its fork.
        self._forks: Dict[socket.socket, int] = {}
        # A pipe that becomes readable when a fork has ended.
        self._ended, self._wake = os.pipe()
        for end in (self._ended, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector = selectors.DefaultSelector()
        for source in (listener, self._ended):
            self._selector.register(source, selectors.EVENT_READ)

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._ended:
                    os.read(self._ended, 4096)
                    self._send_statuses()
                elif key.fileobj in self._forks:
                    self._pass_signal_on(key.fileobj)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        _, user, _ = struct.unpack(
            '3i', connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        fds = array.array('i')
        request, refusal = None, self._refusal or _find_obstacle()
        try:
            request = _receive(connection, fds) if user == os.getuid() else None
            if request is not None:
                connection.sendall(refusal.encode('utf-8', 'backslashreplace') or _STARTED)
        except OSError:
            # The caller is gone.
            request = None
        if request is None or refusal:
            connection.close()
        else:
            server = os.getpid()
            pid = os.fork()
            if not pid:
                self._become(request, list(fds), server, connection)
            self._forks[connection] = pid
            self._selector.register(connection, selectors.EVENT_READ)
        for fd in fds:
            os.close(fd)

    def _pass_signal_on(self, connection: socket.socket) -> None:
        """Send a signal that a caller has received to its fork.

        A fork whose caller is gone is killed.
        """
        try:
            number = connection.recv(1)
        except OSError:
            number = b''
        if number:
            os.kill(self._forks[connection], number[0])
            return
        # The caller is gone.
        self._selector.unregister(connection)
        try:
            os.killpg(self._forks[connection], signal.SIGKILL)
        except ProcessLookupError:
            # The fork has not called setsid yet, so it leads no group.
            os.kill(self._forks[connection], signal.SIGKILL)

    def _send_statuses(self) -> None:
        for connection, pid in list(self._forks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._forks[connection]
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            try:
                self._selector.unregister(connection)
                connection.sendall(struct.pack('<q', code))
            except (KeyError, OSError):
                # The caller is gone.
                pass
            connection.close()

    def _become(
        self, request: Dict[str, Any], fds: List[int], server: int, connection: socket.socket
    ) -> NoReturn:
        """Turn this fork into the script."""
        # EX_SOFTWARE, for an error before the script runs.
        status = 70
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _die_with_parent(server)
            os.setsid()
            self._selector.close()
            for end in (self._ended, self._wake):
                os.close(end)
            for inherited in (self._listener, connection, *self._forks):
                inherited.close()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
                os.close(fd)
            _renew_streams()
            for number in _PASSED_ON:
                handler: Any = (
                    signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                )
                signal.signal(number, signal.SIG_IGN if number in request['ignored'] else handler)
            self._take_over(request['environ'], request['folder'])
            status = _run(request['arguments'])
        except BaseException:
            # Printed here, because os._exit below prints nothing.
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)

    def _take_over(self, environ: Dict[str, str], folder: str) -> None:
        """Take the caller's environment, folder and import path.

        Variables that imports have set in the server are kept, unless the caller sets them. Other
        settings that modules have read from the environment at their import are repeated.
        """
        paths = os.environ.get('PYTHONPATH', '').split(os.pathsep)
        os.environ.clear()
        os.environ.update({**self._imported, **environ})
        os.chdir(folder)
        sys.path[:] = [path for path in environ.get('PYTHONPATH', '').split(os.pathsep) if path] + [
            path for path in sys.path if path not in paths
        ]
        threads = environ.get('OMP_NUM_THREADS')
        if threads != self._omp_threads and threads is not None and threads.isdigit():
            # At most one thread per core, as torch decides when it is imported in a new Python.
            sys.modules['torch'].set_num_threads(
                max(1, min(int(threads), len(os.sched_getaffinity(0))))
            )
        # Otherwise all forks would draw the same numbers. os.fork reseeds only Python's generator.
        sys.modules['numpy'].random.seed()


def _renew_streams() -> None:
    """Replace stdout and stderr, whose objects remember whether the server's files can seek."""
    for name, fd in (('stdout', 1), ('stderr', 2)):
        old: io.TextIOWrapper = sys.__dict__[name]
        new = io.TextIOWrapper(
            io.FileIO(fd, 'w', closefd=False), old.encoding, old.errors, write_through=True
        )
        sys.__dict__.update({name: new, f'__{name}__': new})


def _receive(connection: socket.socket, fds: array.array) -> Optional[Dict[str, Any]]:
    """Return a request and append its open files to ``fds``; None if its sender ends too early."""
    connection.settimeout(_SECONDS_TO_READ_A_REQUEST)
    head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_LEN(3 * fds.itemsize))
    if not ancillary or len(head) < 8:
        return None
    fds.frombytes(ancillary[0][2])
    length, data = struct.unpack('<q', head)[0], b''
    while len(data) < length:
        chunk = connection.recv(length - len(data))
        if not chunk:
            return None
        data += chunk
    connection.settimeout(None)
    return json.loads(data.decode())


def _find_obstacle() -> str:
    """Return the reason why this process cannot fork now; empty if it can."""
    try:
        threads = len(os.listdir('/proc/self/task'))
    except OSError:
        return 'ranks cannot be forked where /proc is not mounted'
    if threads == 1:
        return ''
    # A lock that another thread holds is never released in a fork.
    return (
        f'ranks cannot be forked from a process with {threads} threads; a package starts them '
        f'when it is imported. Set PYTHON_EXEC={sys.executable} in the environment to start '
        f'each rank as a new Python process at once.'
    )


def _run(arguments: List[str]) -> int:
    """Run the script ``arguments[0]`` as ``__main__``; return its exit status."""
    import atexit
    import threading
    import types

    script = arguments[0]
    sys.argv = list(arguments)
    if not getattr(sys.flags, 'safe_path', False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    main: Any = types.ModuleType('__main__')
    main.__file__ = script
    main.__builtins__ = __builtins__
    sys.modules['__main__'] = main
    status: Any = 0
    try:
        with open(script, 'rb') as file:
            code = compile(file.read(), script, 'exec')
        exec(code, main.__dict__)
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        # The traceback starts in the script, not in this function.
        trace = error.__traceback__ and error.__traceback__.tb_next
        # The interpreter sets these, too. Functions that run at exit look for an error there.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if status is not None and not isinstance(status, int):
        sys.stderr.write(f'{status}\n')
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if status == -signal.SIGINT:
        _end_as(status)
    return (status or 0) & 0xFF


def _describe(error: BaseException) -> str:
    try:
        return f'{type(error).__name__}: {error}'
    except Exception:
        # The __str__ of the error is faulty and may raise anything. The text says so.
        return f'{type(error).__name__} without a readable message'


def _import_everything(preloads: Sequence[str]) -> None:
    import importlib

    folder = os.path.dirname(__file__)
    root = os.path.normpath(os.path.join(os.path.abspath(folder), *[os.pardir] * 2))
    sys.path[:] = [root] + [path for path in sys.path if path != folder]
    # Imports leave hardly any garbage.
    gc.disable()
    from mapsage_launcher.drivers import no_plugins_loaded

    with no_plugins_loaded():
        import torch

    # Once a process has asked CUDA for its devices, its forks cannot use CUDA. So the question is
    # answered without CUDA during the imports.
    count_devices = getattr(torch._C, '_cuda_getDeviceCount', None)
    if count_devices is not None:
        torch._C._cuda_getDeviceCount = lambda: 0
    for name in preloads:
        importlib.import_module(name)
    if count_devices is not None:
        torch._C._cuda_getDeviceCount = count_devices
    _refuse_devices_in_use(torch)
    sys.path.remove(root)
    freeze_imports()
    gc.enable()


def _refuse_devices_in_use(torch: Any) -> None:
    """Raise RuntimeError if an import has begun to use cards of a plugin, such as ``torch.gcu``.

    A fork cannot use cards that its parent has used: torch_gcu raises "Cannot re-initialize GCU in
    forked subprocess" there, and other makes do likewise.
    """
    device = getattr(torch._C, '_get_privateuse1_backend_name', lambda: '')()
    is_initialized = getattr(getattr(torch, device, None), 'is_initialized', None)
    if is_initialized is not None and is_initialized():
        raise RuntimeError(
            f'it begins to use the devices of torch.{device}, which a forked '
            f'process cannot use afterwards'
        )


def _serve(listener: int, parent: int, more: Sequence[str]) -> NoReturn:
    _die_with_parent(parent)
    # Slurm sends these signals to every process. Ranks react to them by saving; the server must
    # live.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    environ_before, refusal = dict(os.environ), ''
    try:
        _import_everything(more)
    except BaseException as error:
        # The error is handed to every caller that asks for a fork, as the reason of the refusal.
        sys.excepthook(type(error), error, error.__traceback__)
        refusal = f'ranks cannot be forked, an import fails: {_describe(error)}'
    imported = {
        name: value for name, value in os.environ.items() if environ_before.get(name) != value
    }
    _Server(socket.socket(fileno=listener), refusal, imported).serve()


if __name__ == '__main__':
    if sys.argv[1] == '--serve':
        _serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    if sys.argv[1] == '--become':
        _become_command(int(sys.argv[2]), sys.argv[3:])
    _call(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
