"""Imports modules, and forks processes that need them. `harness/imported_sglang.py` starts it as a script.

It runs with what SGLang's own processes find on their path, so it imports nothing of this project at its start.

* A fork is a child of the process that asks for it, and not of the one that forks it. The latter forks twice; the
  process in between ends at once, and the one that asks adopts the orphan, as the nearest ancestor that has said that
  it does (``PR_SET_CHILD_SUBREAPER``). So waiting, exit codes and CPU times are as for any child.
* A process that forks must have one thread. A scheduler of SGLang has more when it starts its data plane. So each
  process that SGLang's server forks begins with a fork that stays as it is, and forks the data plane later.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_SET_CHILD_SUBREAPER = 36  # of prctl
_HIGH = 500  # file descriptors from here on are in nobody's way
_DATA_PLANE = ["-P", "-m", "sgl_kvfetch.plane"]
_libc = ctypes.CDLL(None)
_is_ready = False  # in a process that SGLang has forked, and in its forks


class Forker:
    """Asks the process at the other end of a socket to fork children of this one."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._lock = threading.Lock()

    def fork(
        self,
        command: Sequence[str],
        fds: Mapping[int, int],
        folder: str | os.PathLike[str],
        environment: Mapping[str, str],
        is_session: bool = False,
    ) -> int:
        """Run ``python`` with a command line, ``-m`` or ``-c`` first. Return the child's ID. ``fds``: from its numbers
        of files to ours. Raises EOFError or OSError if the other end is gone."""
        request = {
            "command": list(command),
            "folder": os.fspath(folder),
            "environment": dict(environment),
            "numbers": list(fds),
            "is_session": is_session,
        }
        with self._lock:
            _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._requests, [json.dumps(request).encode()], list(fds.values()))
                answer = self._requests.recv(32)
            finally:
                _libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise EOFError("no process is left that forks others")
        return int(answer)


def main(number: int, modules: Sequence[str]) -> list[str]:
    """Fork a process for each message from a socket. Return only in the forks, with a command line for Python."""
    given = set(os.environ)
    for name in modules:
        importlib.import_module(name)
    if "sglang" in sys.modules:
        find_bindings_by_index()
    assert "prometheus_client" not in sys.modules, "at import it reads in which folder processes share metrics"
    import setproctitle

    setproctitle.getproctitle()  # the first call finds the title in memory, which a fork cannot
    assert threading.active_count() == 1, f"a fork would lose threads: {threading.enumerate()}"
    added = {name: value for name, value in os.environ.items() if name not in given}  # such as folders of caches
    gc.freeze()  # a collection in a fork would visit, and so copy, all that the imports have made
    return serve(socket.socket(fileno=number), added)


def find_bindings_by_index() -> None:
    """Let SGLang's plugin loader look up where a function that is hooked has been imported. It looks through all names
    of all modules for each hook, which takes a server 1 s of CPU time. Modules that are imported later are few."""
    from sglang.srt.plugins import hook_registry

    known = {module for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    bindings: defaultdict[int, list[tuple[ModuleType, str]]] = defaultdict(list)
    for module in known:
        for name, value in vars(module).items() if module.__name__.startswith("sglang.") else ():
            bindings[id(value)].append((module, name))

    def propagate(original: object, wrapped: object, source: object) -> int:
        modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
        later = [module for module in modules if module not in known]
        places = bindings[id(original)] + [(module, name) for module in later for name in list(vars(module))]
        places = [place for place in places if place[0] is not source and vars(place[0]).get(place[1]) is original]
        for place in places:
            setattr(*place, wrapped)
        return len(places)

    hook_registry._propagate_patch = propagate


def serve(requests: socket.socket, added: Mapping[str, str]) -> list[str]:
    """Fork a process for each request, until the other end is closed. Return only in the forks, with a command line."""
    requests = socket.socket(fileno=_moved(requests.detach()))
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 1 << 20, 64)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        if (between := os.fork()) == 0:
            parent = os.getpid()
            if pid := os.fork():
                os.write(writer, str(pid).encode())
                os._exit(0)
            requests.close()
            os.close(reader)
            os.close(writer)
            while os.getppid() == parent:  # until it is adopted
                time.sleep(0.001)
            return become(json.loads(message), fds, added)
        os.waitpid(between, 0)
        with contextlib.suppress(OSError):  # who asked has ended
            requests.send(os.read(reader, 32))
        for fd in (reader, writer, *fds):
            os.close(fd)


def become(request: dict[str, Any], fds: list[int], added: Mapping[str, str]) -> list[str]:
    """Make this process the one that was asked for. Return its command line."""
    import setproctitle

    if request["is_session"]:
        os.setsid()
    for fd, number in zip([_moved(fd) for fd in fds], request["numbers"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update({**added, **request["environment"]})
    for folder in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
            if (customise := Path(folder, "sitecustomize.py")).exists():
                runpy.run_path(str(customise))
    command: list[str] = request["command"]
    setproctitle.setproctitle(" ".join([sys.executable, "-P", *command]))
    if "sglang" in sys.modules and command[:2] != _DATA_PLANE[1:]:
        os.register_at_fork(after_in_child=_stay_ready)
    return command


def _stay_ready() -> None:
    """In a process that SGLang has just forked: let a fork of it, with one thread, fork the data plane that it will
    start."""
    global _is_ready
    if _is_ready:
        return
    _is_ready = True
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        os._exit(end_of(serve(theirs, {})))
    theirs.close()
    forker = Forker(ours)
    fork_data_planes(lambda: forker)


def fork_data_planes(forker: Callable[[], Forker]) -> Callable[[], None]:
    """Let `subprocess.Popen` fork data planes. Return what ends that."""
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute_child(self: Any, args: Any, *rest: Any) -> None:
        if list(args[1:4]) == _DATA_PLANE:
            fork_child(forker(), self, args[2:], *rest)
        else:
            execute(self, args, *rest)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    return lambda: setattr(subprocess.Popen, "_execute_child", execute)


def fork_child(
    forker: Forker,
    process: Any,
    command: Sequence[str],
    executable: Any,
    preexec_fn: Any,
    close_fds: bool,
    pass_fds: Sequence[int],
    cwd: str | None,
    env: Mapping[str, str] | None,
    *rest: Any,
) -> None:
    """Instead of ``subprocess.Popen._execute_child``, whose arguments it takes: fork the child."""
    pipes, is_session = rest[3:9], rest[14]
    stdin, _, _, stdout, _, stderr = pipes
    fds = {fd: fd for fd in pass_fds} | {number: fd for number, fd in enumerate((stdin, stdout, stderr)) if fd != -1}
    process.pid = forker.fork(command, fds, cwd or os.getcwd(), os.environ if env is None else env, is_session)
    process._child_created = True
    process._close_pipe_fds(*pipes)


def _moved(fd: int) -> int:
    """Give an open file a high number."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(fd)
    return moved


def run(command: list[str]) -> None:
    """Do in this process what ``python`` does with a command line."""
    option, code, *arguments = command
    sys.argv = [option, *arguments]
    if option == "-m":
        runpy.run_module(code, run_name="__main__", alter_sys=True)
    else:
        exec(code, {"__name__": "__main__"})


def end_of(command: list[str]) -> int:
    """Do what ``python`` does with a command line. Return the exit code."""
    try:
        run(command)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    code = end_of(main(int(sys.argv[1]), sys.argv[2:]))
    # As Python ends, but for what it does with modules and objects: for all that was imported, it takes 3 s.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
