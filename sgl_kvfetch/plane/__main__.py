"""``python -m sgl_kvfetch.plane``: the data plane's process. Only the engine starts it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys

import torch

from sgl_kvfetch import timeline
from sgl_kvfetch.plane.service import run_data_plane
from sgl_kvfetch.protocol import Line


def main() -> None:
    line = Line.of(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s kvfetch data plane] %(levelname)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the engine, which then closes this process
    torch.set_num_threads(1)  # a decode session is one thread
    gc.freeze()  # what was imported stays: to look at it again in each full collection stops the loop for 0.1 s
    asyncio.run(run_data_plane(line))
    timeline.close()
    logging.shutdown()
    os._exit(0)  # do not wait for decode threads, which may still be busy


if __name__ == "__main__":
    main()
