"""Makes a real model's profile for ``klt``. It is calibrated once and kept beside the model.

python -m benchmarks.real_profile    # prints the profile's path
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.real_model import Say, one_at_a_time, prose, real_model, say_on_stderr
from benchmarks.report import make_parser, no_traceback
from sgl_kvfetch.codec.quant.profile import PROFILE_VERSION
from sgl_kvfetch.errors import ConfigError

# The second half of the text is for calibration, the first half for prompts.
CALIBRATION_PART, PROMPTS_PART = "0.5:1", "0:0.5"
_ARGUMENTS = ("--windows", "12", "--context", "1024", "--continuation", "256", "--part", CALIBRATION_PART)


def main(argv: Sequence[str] | None = None) -> int:
    make_parser("benchmarks.real_profile", __doc__).parse_args(argv)
    with no_traceback():
        print(real_profile())
    return 0


def real_profile(say: Say = say_on_stderr) -> Path:
    """Return the profile's path. Make the profile if the cache does not have it.

    That takes two cores a few minutes. It uses about half of the default windows of ``kvfetch calibrate``, which is
    enough for a demonstration. Raises ConfigError.
    """
    model = real_model(say)
    made_by = (PROFILE_VERSION, _ARGUMENTS, sys.version_info[:3], _code_digest())
    digest = hashlib.sha256(repr(made_by).encode()).hexdigest()[:12]
    path = model.with_name(f"{model.name}-{digest}.profile")
    if path.is_file():
        return path
    with one_at_a_time(path, say):
        if not path.is_file():
            _make(model, path, say)
    return path


def _make(model: Path, path: Path, say: Say) -> None:
    say("calibrating, once only: 3 minutes on two idle cores, 20 on busy ones, with a bar or a line every ten seconds")
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        text, made = Path(folder, "python-reference.txt"), Path(folder, "profile")
        text.write_text(prose())
        command = [sys.executable, "-m", "sgl_kvfetch.tools", "calibrate", "--model", str(model), "--text", str(text)]
        done = subprocess.run([*command, *_ARGUMENTS, "--out", str(made)], stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise ConfigError(f"cannot calibrate the real model: kvfetch calibrate had exit code {done.returncode}")
        os.replace(made, path)


def _code_digest() -> str:
    """Return a digest of the code that makes a profile, so that profiles made by older code are not used."""
    from sgl_kvfetch.codec import calibrate, quant

    whole = hashlib.sha256()
    for package in (calibrate, quant):
        for file in sorted(Path(package.__path__[0]).glob("*.py")):
            whole.update(file.read_bytes())
    return whole.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
