"""Imports SGLang, and forks processes that need it. A script, which `harness/imported_sglang.py` starts and talks to.

It runs with what SGLang's own processes find on their path, so it imports nothing of this project.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import sys
import threading
from collections import defaultdict
from multiprocessing import forkserver
from types import ModuleType


def main(number: int) -> list[str]:
    """Fork a process for each message from a socket. Return only in the forks, with a command line for Python."""
    given = set(os.environ)
    # The modules that a server imports before and after it reads its arguments.
    import setproctitle
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server  # noqa: F401

    find_bindings_by_index()
    setproctitle.getproctitle()  # the first call finds the title in memory, which a fork cannot
    assert threading.active_count() == 1, f"a fork would lose threads: {threading.enumerate()}"
    assert "prometheus_client" not in sys.modules, "at import it reads in which folder SGLang's processes share metrics"
    added = {name: value for name, value in os.environ.items() if name not in given}  # such as folders of caches
    # Each fork waits for one of its own, and reports its CPU time. With SIGCHLD ignored, nobody needs to wait for the
    # forks, and the kernel does not count the time a second time, for this process.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # A collection in a fork would visit, and so copy, all that the imports have made. At its end, extensions want it.
    gc.freeze()
    atexit.register(gc.unfreeze)
    with socket.socket(fileno=number) as requests:
        while True:
            message, fds, _, _ = socket.recv_fds(requests, 1 << 20, 3)
            if not message:  # the harness has ended
                os._exit(0)
            if os.fork() == 0:
                requests.close()
                request = json.loads(message)
                return become(request["command"], request["folder"], added | request["environment"], *fds)
            for fd in fds:
                os.close(fd)


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


def become(
    command: list[str], folder: str, environment: dict[str, str], stdout: int, stderr: int, status: int
) -> list[str]:
    """Fork once more, and return the command in the new process. This process writes the new one's ID, exit code and
    CPU time in microseconds to ``status``, and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        os.close(stdout)
        os.close(stderr)
        forkserver.write_signed(status, pid)
        _, ended, used = os.wait4(pid, 0)
        forkserver.write_signed(status, os.waitstatus_to_exitcode(ended))
        forkserver.write_signed(status, round(1e6 * (used.ru_utime + used.ru_stime)))
        os._exit(0)
    os.close(status)
    os.setsid()
    os.chdir(folder)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.environ.clear()
    os.environ.update(environment)
    return command


if __name__ == "__main__":
    option, code, *arguments = main(int(sys.argv[1]))
    sys.argv = [option, *arguments]
    if option == "-m":
        runpy.run_module(code, run_name="__main__", alter_sys=True)
    else:
        exec(code, {"__name__": "__main__"})
