"""``python -m sgl_kvfetch.plane``: the data plane's process. Only the engine starts it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys

import torch

from sgl_kvfetch import timeline
from sgl_kvfetch.plane.arena import Arena
from sgl_kvfetch.plane.process import Line
from sgl_kvfetch.plane.service import run_data_plane


def main() -> None:
    commands_fd, events_fd, *numbers = map(int, sys.argv[1:])
    values, pages, *pool = zip(numbers[::2], numbers[1::2], strict=True)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s kvfetch data plane] %(levelname)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the engine, which then closes this process
    torch.set_num_threads(1)  # a decode session is one thread
    commands, events = (socket.socket(fileno=fd) for fd in (commands_fd, events_fd))
    line = Line(commands, events, Arena(*values), Arena(*pages), tuple(pool))
    gc.freeze()  # what was imported stays: to look at it again in each full collection stops the loop for 0.1 s
    asyncio.run(run_data_plane(line))
    timeline.close()
    logging.shutdown()
    os._exit(0)  # do not wait for decode threads, which may still be busy


if __name__ == "__main__":
    main()
