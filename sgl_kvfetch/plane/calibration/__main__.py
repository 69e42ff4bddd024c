"""``python -m sgl_kvfetch.plane.calibration JOB``: calibrate a model on prompts of its server. Only `own.py` starts it.

It is a process of its own with the lowest priority: Linux runs it when no other process wants the core, and ends it
first if memory is short. It ends with the data plane that started it. It reads and writes files alone, so what it needs
to know is in the job; its log goes where the data plane's goes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from sgl_kvfetch.errors import KVFetchError, why
from sgl_kvfetch.plane.calibration.own import READY, Job
from sgl_kvfetch.processes import available_bytes, end_with_parent, map_large_blocks, own_bytes
from sgl_kvfetch.prompts import CONTEXT_TOKENS, CONTINUATION_TOKENS

logger = logging.getLogger(__name__)

_SAY_EVERY_S = 60.0
_LOOK_EVERY_S = 0.5
_KIND = "prompts"  # of text
_MEMORY_PART = 0.8  # of what is available


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    end_with_parent(job.parent)
    _give_way()
    os.write(1, READY)
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s kvfetch calibration] %(message)s")
    most_bytes = int(_MEMORY_PART * available_bytes())
    threading.Thread(target=_watch_memory, args=(most_bytes,), name="kvfetch-memory", daemon=True).start()
    try:
        calibrate(job)
    except KVFetchError as e:
        fault = str(e)
    except (ImportError, MemoryError, OSError, RuntimeError, ValueError) as e:  # torch and transformers, by the model
        fault = why(e) if isinstance(e, OSError) else f"{type(e).__name__}: {e}"
    else:
        return
    _say_failed(fault)
    sys.exit(1)


def _give_way() -> None:
    """Run only on cores that nothing else wants, and be the first process to end if memory is short."""
    os.nice(19)
    with contextlib.suppress(OSError):  # where a sandbox does not know it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _watch_memory(most_bytes: int) -> None:
    """End this process when it has taken more than it may. Runs on a thread.

    Where memory is short, Kubernetes lets Linux end all processes of a container, SGLang among them. Linux's own limits
    for a process do not help: they also count the checkpoint, which is only mapped."""
    while own_bytes() <= most_bytes:
        time.sleep(_LOOK_EVERY_S)
    _say_failed(f"it takes more than {most_bytes / 1e9:.1f} GB, four fifths of the memory that was available")
    os._exit(1)


def _say_failed(fault: str) -> None:
    logger.error("kvfetch: the model cannot be calibrated here, and this server stores with 'exact': %s", fault)


def calibrate(job: Job) -> None:
    """Write the profile of a model to ``job.profile``. Raises ConfigError and UnsupportedError."""
    import torch

    from sgl_kvfetch.codec import Calibration, CalibrationOptions, LayeredModel, calibrate_model, map_layers
    from sgl_kvfetch.codec.calibrate.text import calibration_windows

    torch.set_num_threads(job.num_threads)
    map_large_blocks()
    model = LayeredModel(job.model_folder)
    context, continuation = CONTEXT_TOKENS, CONTINUATION_TOKENS
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and most < context + continuation:
        context, continuation = most * 2 // 3, most - most * 2 // 3
    texts = job.read_windows(model.tokenizer)
    windows = calibration_windows(model.tokenizer, texts, len(texts), context + continuation)
    layers, notes = map_layers(model)
    describe = Calibration(
        model=job.model_name,
        weights=job.weights,
        text="prompts of a server",
        num_windows=len(windows),
        context_tokens=context,
        continuation_tokens=continuation,
        notes=notes,
    )
    options = CalibrationOptions(num_context=context, tp_size=job.tp_size)
    profile = calibrate_model(model, {_KIND: windows}, layers, describe, options, _progress, Path(job.unfinished))
    if profile.few_tokens:
        logger.warning("kvfetch calibrates: %s", profile.few_tokens)
    profile.save(Path(job.profile))


def _progress(steps: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """Pass on ``steps``, and log how far they are, now and then."""
    started_s = said_s = time.monotonic()
    for done, step in enumerate(steps, 1):
        yield step
        now_s = time.monotonic()
        if done == total or now_s >= said_s + _SAY_EVERY_S:
            left_s = (now_s - started_s) / done * (total - done)
            logger.info("kvfetch calibrates: %s, %d of %d, about %.0f s left", what, done, total, left_s)
            said_s = now_s


if __name__ == "__main__":
    main()
