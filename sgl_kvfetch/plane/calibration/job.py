"""What a data plane hands over to the process that calibrates, and the file with the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sgl_kvfetch.errors import DECODE_ERRORS, ConfigError, why

if TYPE_CHECKING:
    import torch

READY = b"ready\n"  # the process writes it once it ends with its parent, and before it computes
Windows = Sequence[Sequence[bytes]]  # as in `messages.ShowPrompts`


class Job(msgspec.Struct, frozen=True):
    """What the process that calibrates needs to know. Paths are of files; ``parent`` is the data plane's process."""

    parent: int
    model_folder: str
    model_name: str
    weights: str
    tp_size: int
    num_threads: int
    prompts: str
    unfinished: str
    profile: str

    def read_windows(self, tokenizer: Any) -> list[torch.Tensor]:
        """Return the prompts' windows, ``(tokens,)`` int64 each, without the tokens that stand before every prompt.
        Raises ConfigError."""
        import torch

        from sgl_kvfetch.codec.calibrate import without_prompt_start

        def tokens(piece: bytes) -> torch.Tensor:
            return without_prompt_start(tokenizer, torch.frombuffer(bytearray(piece), dtype=torch.int32))

        return [torch.cat([tokens(piece) for piece in each]) for each in read_prompts(Path(self.prompts))]


def write_prompts(path: Path, windows: Windows) -> None:
    """Write the prompts, which only this user may read. Raises OSError."""
    partial = path.with_suffix(".new")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600)
    partial.write_bytes(msgspec.msgpack.encode(windows))
    partial.replace(path)


def read_prompts(path: Path) -> Windows:
    """Read the prompts that `write_prompts` wrote. Raises ConfigError."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=list[list[bytes]])
    except (*DECODE_ERRORS, OSError) as e:
        raise ConfigError(f"{path}: {why(e) if isinstance(e, OSError) else e}") from e
