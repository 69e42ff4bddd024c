"""Compress the KV cache of a Transformers model at several targets, and measure what each costs its predictions.

    python examples/compress.py --model FOLDER --profile FILE --text FILE --plot compress.png

``kvfetch calibrate`` makes the profile. It needs `pip install '.[bench]'`, in a checkout.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from sgl_kvfetch.codec import compress, decompress, load_profile
from sgl_kvfetch.errors import KVFetchError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--profile", type=Path, required=True, help="made by kvfetch calibrate")
    parser.add_argument("--text", type=Path, required=True, help="a text that the calibration has not seen")
    parser.add_argument("--tokens", type=int, default=1024, help="of the context that is compressed")
    parser.add_argument("--continuation", type=int, default=256, help="tokens whose predictions are compared")
    parser.add_argument("--plot", type=Path, help="write a picture of the table here")
    args = parser.parse_args()
    text, profile = args.text.read_text(), load_profile(args.profile)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids
    context, rest = ids[:, : args.tokens].split(args.tokens, 1)[0], ids[:, args.tokens :][:, : args.continuation]
    if context.shape[1] < args.tokens or rest.shape[1] < args.continuation:
        parser.error(f"{args.text} has {ids.shape[1]} tokens, expected {args.tokens + args.continuation}")

    cache = model(context, use_cache=True).past_key_values
    k, v = (torch.stack([x[0].transpose(0, 1) for x in part], 1).bfloat16() for part in layers_of(cache))

    def predictions(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        past = DynamicCache()
        for layer, (keys, values) in enumerate(zip(k.unbind(1), v.unbind(1), strict=True)):
            past.update(*(x.transpose(0, 1)[None].float() for x in (keys, values)), layer)
        logits: torch.Tensor = model(rest, past_key_values=past).logits[0]
        return logits.log_softmax(-1)

    exact = predictions(k, v)
    low, high = profile.curve[0].kl, profile.curve[-1].kl
    exact_bits = compress(k, v).bits_per_value
    print(f"{len(k)} tokens, {k.shape[1]} layers of {k.shape[2]} heads; exact takes {exact_bits:.2f} bits per value")
    print(f"{'target':>9} {'measured':>9} {'bits':>6} {'of bf16':>8}")
    rows = []
    for target in (kl for kl in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1) if low <= kl <= high):
        compressed = compress(k, v, profile, target)
        found = predictions(*decompress(compressed.data, profile))
        kl = float((exact.exp() * (exact - found)).sum(-1).mean())
        rows.append((compressed.kl, kl, compressed.bits_per_value))
        print(f"{compressed.kl:9.1e} {kl:9.1e} {rows[-1][2]:6.2f} {rows[-1][2] / 16:8.1%}")
    if args.plot:
        draw(rows, args.plot)


def layers_of(cache: DynamicCache) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the keys and the values of all layers, each ``(1, heads, tokens, dim)``."""
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]


def draw(rows: list[tuple[float, float, float]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    targets, found, bits = zip(*rows, strict=True)
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axes.plot(bits, targets, "o--", color="tab:gray", label="as calibration promises")
    axes.plot(bits, found, "o-", color="tab:blue", label="measured on this text")
    axes.set(
        yscale="log",
        xlabel="bits per value, all bytes counted (bfloat16 has 16)",
        ylabel="KL divergence, nats per token",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    try:
        main()
    except (KVFetchError, OSError) as e:  # transformers raises OSError for what is no model
        raise SystemExit(f"compress.py: {e}") from None
