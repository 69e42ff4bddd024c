"""Measures what `kvfetch calibrate` needs for a large model: memory, which should not grow with the number of layers,
and time, from which that of the whole model follows.

    python -m benchmarks.calibrating --folder DIRECTORY [--shape llama-3.1-70b] [--layers 4,16] [--windows N]

For each number of layers, a checkpoint with random weights and the shapes of the model is written to the folder, in
bfloat16, one file a layer, and is removed afterwards. 16 layers of Llama-3.1-70B take 32 GB. Memory is what the process
has for itself: files that it maps, such as weights before they are converted, are the kernel's to forget.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from rich.console import Console
from safetensors.torch import save_file

from benchmarks.machine import machine, versions
from benchmarks.prose import prose
from benchmarks.real_model import real_model
from benchmarks.report import make_parser, make_table, run_and_report, settings, whole_number, whole_numbers
from sgl_kvfetch.errors import ConfigError

SHAPES: dict[str, dict[str, int]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
    },
    "llama-3.1-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
    },
    # The keys and values of the models above, behind small layers: shows soon what grows with the number of layers.
    "thin": {
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
    },
}
_VOCABULARY = 128256
_STD = 0.02
_POLL_S = 0.02


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.calibrating", __doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints may be written")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-70b")
    parser.add_argument("--layers", type=whole_numbers, default="4,16")
    parser.add_argument("--windows", type=whole_number, default=2)
    parser.add_argument("--context", type=whole_number, default=256)
    parser.add_argument("--continuation", type=whole_number, default=64)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return run_and_report(run, parser.parse_args(argv), 100)


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for num_layers in args.layers:
        folder = args.folder / f"{args.shape}-{num_layers}-layers"
        folder.mkdir(parents=True)
        try:
            num_bytes = _write_checkpoint(folder, SHAPES[args.shape] | {"num_hidden_layers": num_layers})
            console.print(f"{num_layers} layers: {num_bytes / 1e9:.1f} GB written")
            rows.append({"layers": num_layers, "checkpoint_bytes": num_bytes} | _calibrate(folder, args))
        finally:
            shutil.rmtree(folder)
    cells = [
        [
            str(row["layers"]),
            f"{row['checkpoint_bytes'] / 1e9:.1f} GB",
            f"{row['peak_bytes'] / 1e9:.2f} GB",
            f"{row['seconds']:.0f} s",
            f"{row['cpu_s']:.0f} s",
        ]
        for row in rows
    ]
    console.print(make_table(args.shape, ("layers", "checkpoint", "memory", "time", "CPU time"), cells))
    if len(rows) > 1:
        first, last = rows[0], rows[-1]
        a_layer_s = (last["seconds"] - first["seconds"]) / (last["layers"] - first["layers"])
        left = SHAPES[args.shape]["num_hidden_layers"] - last["layers"]
        console.print(
            f"a layer: {a_layer_s:.1f} s; the whole model: {(last['seconds'] + left * a_layer_s) / 3600:.2f} h"
        )
    return {
        "benchmark": "calibrating",
        "settings": settings(args),
        "rows": rows,
        "machine": machine(),
        "versions": versions(),
    }


def _calibrate(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    text = model / "text.txt"
    text.write_text(prose())
    command = [sys.executable, "-m", "sgl_kvfetch.tools", "calibrate", "--model", str(model), "--text", str(text)]
    for name in ("windows", "context", "continuation"):
        command += [f"--{name}", str(getattr(args, name))]
    started_s = time.monotonic()
    process = psutil.Popen([*command, "--out", str(model / "made.profile")], stdout=subprocess.DEVNULL)
    peak, cpu_s = 0, 0.0
    while process.poll() is None:
        try:
            memory, times = process.memory_info(), process.cpu_times()
        except psutil.Error:  # it has just ended
            break
        peak = max(peak, memory.rss - memory.shared)
        cpu_s = times.user + times.system
        time.sleep(_POLL_S)
    if process.wait():
        raise ConfigError(f"kvfetch calibrate had exit code {process.returncode}")
    return {"peak_bytes": peak, "seconds": time.monotonic() - started_s, "cpu_s": cpu_s}


def _write_checkpoint(folder: Path, shape: dict[str, int]) -> int:
    """Write a random checkpoint, with the tokenizer of a small model, and return its bytes."""
    for file in real_model().glob("*token*"):
        shutil.copy(file, folder)
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config |= {"vocab_size": _VOCABULARY, "max_position_embeddings": 8192, "rope_theta": 500000.0}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False} | shape))
    noise = (torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)) * _STD).bfloat16()
    places: dict[str, str] = {}
    total = 0
    for index, tensors in enumerate(_tensors(shape)):
        name = f"model-{index:05}.safetensors"
        made = {tensor: _filled(noise, size) for tensor, size in tensors.items()}
        save_file(made, folder / name, {"format": "pt"})
        places |= dict.fromkeys(made, name)
        total += sum(x.nbytes for x in made.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json))
    return total


def _tensors(shape: dict[str, int]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield names and sizes of Llama's tensors, file by file."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    yield {"model.embed_tokens.weight": (_VOCABULARY, hidden)}
    yield {"lm_head.weight": (_VOCABULARY, hidden), "model.norm.weight": (hidden,)}
    attention = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield (
            {f"{prefix}.self_attn.{name}.weight": size for name, size in attention.items()}
            | {f"{prefix}.mlp.{name}.weight": size for name, size in mlp.items()}
            | {f"{prefix}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        )


def _filled(noise: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Return a norm's weights, which are ones, or a matrix that repeats ``noise``."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    total = size[0] * size[1]
    return noise.repeat(-(-total // len(noise)))[:total].reshape(size)


if __name__ == "__main__":
    sys.exit(main())
