"""A Python that has its imports behind it: what tests start as `python tools/...` forks from it.

Importing torch, MMEngine and MMSegmentation takes a rank seconds of processor time, most of what a
short run takes. One process of a test session, the warm one, imports them; `warm_python()` gives
the path of a program that stands for `python` and lets a script run in a fork of the warm process,
with the caller's arguments, environment, folder and files. Signals and the exit status pass
through, and a fork whose caller is killed is killed. Anything but a script (`-c`, `-m`) is left to
the real Python.

Run as a program this file is the caller's side (see the end), or with `--serve` the warm process.
"""
import atexit
import json
import os
import signal
import socket
import sys

_ADDRESS = 'MAPSAGE_TEST_WARM_SOCKET'
_FDS = 3


def warm_python():
    """Return the path of the program, starting the warm process at the first call."""
    if _ADDRESS not in os.environ:
        _start()
    return os.path.join(os.path.dirname(os.environ[_ADDRESS]), 'python')


def _start():
    import shutil
    import subprocess
    import tempfile
    folder = tempfile.mkdtemp(prefix='mapsage-warm-')
    address = os.path.join(folder, 'socket')
    program = os.path.join(folder, 'python')
    with open(program, 'w') as file:
        file.write('#!/bin/sh\nexec "%s" -S -E "%s" "$@"\n' % (sys.executable, __file__))
    os.chmod(program, 0o755)
    server = subprocess.Popen([sys.executable, __file__, '--serve', address],
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == b'ready\n'
    os.environ[_ADDRESS] = address

    def stop():
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)


# --- the caller's side; without site-packages, so that it starts in milliseconds

def call(arguments):
    while arguments and arguments[0] == '-u':
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith('-') or _ADDRESS not in os.environ:
        os.execv(sys.executable, [sys.executable] + arguments)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[_ADDRESS])
    request = json.dumps(dict(arguments=arguments, folder=os.getcwd(), environ=dict(os.environ),
                              ignored=signal.getsignal(signal.SIGINT) == signal.SIG_IGN))
    data = request.encode()
    import array
    connection.sendmsg([len(data).to_bytes(8, 'little')],
                       [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0, 1, 2]))])
    connection.sendall(data)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
    answer = connection.recv(8)
    if len(answer) < 8:  # the warm process has gone, and with it the script
        os._exit(70)
    status = int.from_bytes(answer, 'little', signed=True)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
        signal.pause()
    os._exit(status)


# --- the warm process

def serve(address):
    import array
    import selectors
    import time
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    _import_everything()
    sys.stdout.write('ready\n')
    sys.stdout.flush()
    parent = os.getppid()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    running = {}  # connection to pid
    while os.getppid() == parent:
        for key, _ in selector.select(0.02):
            if key.fileobj is listener:
                connection, _ = listener.accept()
                head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_LEN(_FDS * 4))
                if not ancillary:
                    connection.close()
                    continue
                fds = array.array('i')
                fds.frombytes(ancillary[0][2])
                left, data = int.from_bytes(head, 'little'), b''
                while len(data) < left:
                    data += connection.recv(left - len(data))
                pid = os.fork()
                if not pid:
                    _be_script(json.loads(data.decode()), list(fds),
                               [listener, connection, *running], selector)
                for fd in fds:
                    os.close(fd)
                running[connection] = pid
                selector.register(connection, selectors.EVENT_READ)
                continue
            pid = running.get(key.fileobj)
            try:
                told = key.fileobj.recv(1)
            except OSError:
                told = b''
            if pid is not None:
                os.kill(pid, told[0] if told else signal.SIGKILL)
            if not told:
                selector.unregister(key.fileobj)
        for connection, pid in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del running[connection]
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            try:
                connection.sendall(code.to_bytes(8, 'little', signed=True))
            except OSError:  # the caller has gone
                pass
            try:
                selector.unregister(connection)
            except KeyError:
                pass
            connection.close()
            time.sleep(0)


def _import_everything():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.insert(0, root)
    import importlib

    import torch
    # Asked for its devices, CUDA is of no more use in a fork.
    asks = getattr(torch._C, '_cuda_getDeviceCount', None)
    if asks is not None:
        torch._C._cuda_getDeviceCount = lambda: 0
    for name in ('torch.distributed.run', 'mapsage', 'mapsage.commands.cli',
                 'mapsage.commands.predict', 'mmengine.runner', 'mmseg.apis', 'mmseg.models',
                 'mmseg.datasets', 'mmseg.evaluation', 'mmseg.visualization',
                 'mmengine.visualization', 'mmseg.engine', 'matplotlib.pyplot', 'rich.progress',
                 'torch.profiler'):
        importlib.import_module(name)
    from mmengine.config import Config
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.)  # imports torch._dynamo
    assert Config(dict(a=1)).pretty_text  # imports yapf
    if asks is not None:
        torch._C._cuda_getDeviceCount = asks
    sys.path.remove(root)
    threads = os.listdir('/proc/self/task')
    assert len(threads) == 1, 'a process with %d threads must not fork' % len(threads)


def _be_script(request, fds, sockets, selector):
    status = 70
    try:
        for each in sockets:
            each.close()
        selector.close()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        signal.signal(signal.SIGINT, signal.SIG_IGN if request['ignored'] else
                      signal.default_int_handler)
        status = _run(request)
    finally:
        os._exit(status)


def _run(request):
    import runpy
    import threading
    import traceback
    os.environ.clear()
    os.environ.update(request['environ'])
    os.chdir(request['folder'])
    script = request['arguments'][0]
    sys.argv = list(request['arguments'])
    more = [path for path in os.environ.get('PYTHONPATH', '').split(os.pathsep) if path]
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = ([os.path.dirname(os.path.abspath(script))] + more
                   + [path for path in sys.path if path != here])
    sys.stdin = open(0)
    sys.stdout.reconfigure(line_buffering=True)
    try:
        runpy.run_path(script, run_name='__main__')
        status = 0
    except SystemExit as end:
        status = end.code
        if status is None:
            status = 0
        elif not isinstance(status, int):
            sys.stderr.write('%s\n' % (status,))
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == '__main__':
    if sys.argv[1:2] == ['--serve']:
        serve(sys.argv[2])
    else:
        call(sys.argv[1:])
