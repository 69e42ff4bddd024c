"""What the system does for one process: end it, also with its parent, keep its memory from others, take memory back,
and say how its OpenMP threads wait, or give it one of them for copies.

Why one thread for copies: With a team of our own, the process would have more OpenMP threads than cores. Then libgomp's
threads sleep, instead of spinning, between the parts of a computation, and a model on a CPU is a third slower from then
on.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_lock = threading.Lock()


def use_one_thread() -> None:
    """Let the calling thread compute alone. Other threads keep their teams, also those that begin to compute later:
    `torch.set_num_threads` would change theirs, too."""
    import torch  # a store has none

    with _lock:  # a second thread would take the 1 of the first for what others have
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        others = threading.Thread(target=torch.set_num_threads, args=(before,), name="kvfetch-openmp")
        others.start()
        others.join()


# Where others want the cores, too, two threads that spin took 4.4 times the CPU time of one that calibrates, and 2.6
# times as long; two that sleep took the same CPU time as one, and 0.8 times as long.
SLEEPING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}


def let_threads_sleep() -> None:
    """Let OpenMP's threads sleep while they wait for each other, unless the environment says otherwise. Call it before
    torch is imported, which reads that."""
    for name, value in SLEEPING_THREADS.items():
        os.environ.setdefault(name, value)


_SET_PARENT_DEATH_SIGNAL, _GET_DUMPABLE, _SET_DUMPABLE = 1, 3, 4  # of prctl(2)
_MMAP_THRESHOLD = -3  # of mallopt(3)
_CANNOT_FLUSH = 120  # Python's exit code for that


def run_and_end(main: Callable[[], object]) -> None:
    """Call ``main``, and end this process with its exit code if it has used obstore. Otherwise, return or raise as
    ``main`` does: Python can end the process.

    obstore answers from threads of its own. They take Python's lock once more behind an answer, to drop what belonged
    to the request, and nobody can wait for that. One that comes while Python takes the interpreter apart aborts the
    process, after a right answer. So that part is left out. Before it, Python waits for threads, calls what `atexit`
    has, and flushes; that is done here.
    """
    code: object = None
    try:
        main()
    except BaseException as error:
        if not _has_used_obstore():
            raise
        if isinstance(error, SystemExit):
            code = error.code
        else:
            sys.excepthook(type(error), error, error.__traceback__)
            code = 1
    if _has_used_obstore():
        _end(code)


def _has_used_obstore() -> bool:
    return "obstore" in sys.modules


def _end(code: object) -> None:
    """End this process at once. ``code``: as `sys.exit` takes it."""
    status = 1
    try:
        if code is None or isinstance(code, int):
            status = code or 0
        else:
            print(code, file=sys.stderr)
        threading._shutdown()  # type: ignore[attr-defined]  # waits; the children of multiprocessing end so, too
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
    except OSError:  # who reads our output has gone
        status = status or _CANNOT_FLUSH
    finally:
        os._exit(status)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. ``parent``: its process."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os.kill(os.getpid(), signal.SIGKILL)


def available_bytes(root: Path = Path("/")) -> int:
    """Return how much memory this process could still take without taking it from others: on the machine, and within
    the limit of its control group, as containers have one. ``root``: of the file system, for tests."""
    machine = _numbers(root / "proc/meminfo")["MemAvailable:"] * 1024
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            group = root / "sys/fs/cgroup" / line[3:].strip("/")
            try:
                limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
                unused = int(limit) - int(used) + _numbers(group / "memory.stat")["inactive_file"]  # a file cache
            except (OSError, ValueError, KeyError):  # no such controller, or "max", which is no limit
                return machine
            return max(0, min(machine, unused))
    return machine


def own_bytes() -> int:
    """Return how much memory this process has taken for itself, without what it has mapped from files."""
    return _numbers(Path("/proc/self/status"))["RssAnon:"] * 1024


def _numbers(file: Path) -> dict[str, int]:
    """Return the numbers in a file whose lines are a name, a number and perhaps a unit."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


@contextmanager
def hidden_memory() -> Iterator[None]:
    """Leave no core dump, which would hold tokens, and let only root read this process's memory and environment."""
    before = _prctl(_GET_DUMPABLE)
    _prctl(_SET_DUMPABLE, 0)
    try:
        yield
    finally:
        _prctl(_SET_DUMPABLE, before)


def map_large_blocks() -> None:
    """Let malloc map each block of 1 MiB or more, so that a freed one goes back to the kernel at once.

    Otherwise glibc keeps what was freed of up to 32 MiB, with holes: a third of what calibrating takes. Does nothing
    with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 20)


def _prctl(option: int, value: int = 0) -> int:
    result: int = ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
