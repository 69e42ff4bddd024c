"""Run a transformers model one decoder layer at a time, so that only one layer's weights are in memory.

Models differ in what they do around their layers: they scale embeddings, make masks and positions, cap logits. None of
that is written out here. The model's own ``forward`` does it, with something else in the place of its layers:

* Layers that note how they are called, and return what they got. So the first one tells the embedded tokens, and each
  tells its other arguments. These depend on the number of tokens, not on the tokens, so one set of ``Calls`` serves all
  windows of a length.
* Then each layer is called by itself with these arguments, as ``Layer``. Whoever calibrates keeps the hidden states
  between layers, and so decides what passes a layer while its weights are loaded.
* Layers that return given hidden states, those behind the last layer. So ``forward`` tells the logits.

The model is made without weights (on torch's device "meta"), and all its layers stay so, but for a copy of the one that
is in use. transformers' own loader fills it from the checkpoint's tensors of this layer. It knows their names, merges
experts, and restores most kinds of quantised weights; `packed.py` restores those of AWQ and GPTQ before it sees them.

Keys and values are what a layer hands its cache: a cache of one layer (``_layer_cache``) takes them, and hands back
those of a given past. So it does not matter how attention is written, as long as it has keys and values to cache, and
caches nothing else but the keys of an indexer. Layers of another kind, such as convolutions and linear attention, keep
states instead. The cache takes and hands back these as well.

A checkpoint may hold more than a language model, such as an encoder of images. Text does not pass through it, and the K
and V of the language model are ordinary ones. So modules beside the language model are emptied, and their weights are
never read.

Models and their layers are other people's code, which fails in many ways where a model is not made for this. What it
raises becomes an error of ours with one line.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from sgl_kvfetch.codec.calibrate.addend import Addend, SmallPass, find_addend, main_output
from sgl_kvfetch.codec.calibrate.packed import Packing, take_packing
from sgl_kvfetch.codec.calibrate.text import prompt_start
from sgl_kvfetch.codec.quant.layer_map import Pool
from sgl_kvfetch.errors import ConfigError, KVFetchError, UnsupportedError

_PROBE_TOKENS = 64
_SMALL_TOKENS = 16
_MOST_STATES = 4  # of a layer; models have one of each kind, or a few
_VOCABULARY_AT_ONCE = 8192  # rows of the output matrix that are in float32 at once
# What tells transformers to restore weights that are quantised in the checkpoint while it loads them.
_PLAIN_WEIGHTS = {
    "fp8": {"dequantize": True},
    "mxfp4": {"dequantize": True},
}
_NOT_ATTENTION = re.compile(r"\.(mlp|experts|feed_forward|block_sparse_moe)\.")
_OTHER_STATES = "keep other states, alongside keys and values or instead of them"


# Models by their names. SGLang decides by a model's architecture whether layers with a window share the pool of the
# others, as in Gemma 3, or have a pool of their own, which forgets what a window has left: `is_hybrid_swa_model` names
# these. tests/codec/calibrate/test_pools.py compares them with SGLang, which a machine that calibrates need not have.
WINDOWS_APART = frozenset(
    {
        "BeamForCausalLM",
        "DeepseekV4ForCausalLM",
        "DiffusionGemmaForBlockDiffusion",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "GptOssForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteSWAForCausalLM",
        "InklingForConditionalGeneration",
        "LagunaForCausalLM",
        "Llama4ForConditionalGeneration",
        "MellumForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MuseGlimmerForCausalLM",
        "MuseGlimmerForConditionalGeneration",
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
    }
)
_SLIDING = ("sliding_attention", "chunked_attention")
# Layers without attention, in models whose layers are either attention or something else.
_KEEPS_NOTHING = ("mlp", "moe")


class KV(NamedTuple):
    """Keys and values of one layer, ``(tokens, heads, dim)``. Keys are rotated, as in SGLang's pools. With MLA, K is
    the rotated part of the one vector that a token has in a layer, and V is the rest, the latent vector.

    ``indexer``: the keys of the layer's indexer, which chooses the tokens to attend to, ``(tokens, dim)``; None if it
    has none. SGLang keeps them in a pool of their own, so they are always exact."""

    k: torch.Tensor
    v: torch.Tensor
    indexer: torch.Tensor | None = None


class States(NamedTuple):
    """What a layer keeps that has no keys and values: states, which stand for all tokens before them, by number."""

    conv: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]


Past = KV | States | None
"""What a layer keeps of a sequence. None: nothing, as a layer that is an MLP alone."""

Exact = Past | torch.Tensor
"""What stays exact of a layer: all that it keeps, or the keys of its indexer beside K and V that do not."""

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]
"""How a model calls each of its layers: arguments behind the hidden states, and named ones."""


class LayeredModel:
    """A causal language model. Its layers have full attention, sliding windows, MLA or states. It computes in float32.

    Attributes: ``num_layers``. ``pools``: where SGLang has what each keeps. ``num_heads``, ``k_head_dim``,
    ``v_head_dim``: the shape of K and V in the layers that a profile is of. ``probe``: for these, by number, the keys
    of one token that is repeated, float32 ``(tokens, heads, dim)``; see `layer_map`.
    """

    def __init__(self, path: str, *, device: str = "cpu") -> None:
        """``path``: anything that transformers loads from safetensors.

        Raises ConfigError if nothing can be loaded, UnsupportedError if the layers have no plain K and V.
        """
        try:
            import transformers
        except ImportError as e:
            raise ConfigError(
                f"this needs transformers, which is not installed: pip install '.[bench]' in a checkout ({e})"
            ) from e
        transformers.utils.logging.disable_progress_bar()
        self.path = path
        self.device = device
        try:
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
            config = transformers.AutoConfig.from_pretrained(path)
            packing = take_packing(path, config)
            self._model, files, self._load_config, dtype = _without_weights(path, config, device)
        except KVFetchError:
            raise
        except ImportError as e:  # of a package that restores quantised weights
            raise ConfigError(f"{path}: {_first_line(e)}") from e
        except Exception as e:
            raise ConfigError(f"no model with a tokenizer at {path!r}: {_first_line(e)}") from e
        self.start = prompt_start(self.tokenizer)
        self.config: Any = self._model.config.get_text_config()
        self._is_mla = getattr(self.config, "kv_lora_rank", None) is not None
        self.num_layers: int = getattr(self.config, "num_hidden_layers", 0)
        self._layers, self._layer_key = self._find_layers()
        _empty_encoders(self._model)
        self._open_files = ExitStack()
        self._weights = self._open(files, packing)
        self._load_rest(dtype)
        self._extras = self._find_extras()
        small = torch.arange(_SMALL_TOKENS) + self.config.vocab_size // 2  # ordinary tokens, most likely
        self._require_calls_of_any_tokens(small)
        # A few different tokens, as the first layer gets them, and how layers are called for them.
        self.small = self.embed(small), self.calls(_SMALL_TOKENS)
        found = self._probe_layers()
        self.pools = [self._pool_of(number, past) for number, past in enumerate(found)]
        keys = {n: past for n, past in enumerate(found) if isinstance(past, KV) and self.pools[n] == Pool.KV}
        if not keys:
            raise UnsupportedError(f"{path}: it has no layer with keys and values of all tokens")
        if len({(kv.k.shape, kv.v.shape) for kv in keys.values()}) != 1:
            raise UnsupportedError(f"{path}: its layers have keys and values of different shapes")
        self.probe = {number: kv.k.float().cpu() for number, kv in keys.items()}
        first = next(iter(keys.values()))
        self.num_heads, self.k_head_dim = first.k.shape[1:]
        self.v_head_dim = first.v.shape[2]

    def inverse_frequencies(self) -> list[torch.Tensor]:
        """Return the model's buffers of rotary frequencies, one number a pair of channels. Most models have one, others
        one for each type of layer."""
        buffers = ((name.rpartition(".")[2], x) for name, x in self._model.named_buffers())
        return [x for name, x in buffers if name.endswith("inv_freq") and "original" not in name]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return what the first layer gets for a sequence, float32 ``(tokens, hidden)``."""
        return self._record_calls(ids, 0)[0][0].float().cpu()

    def calls(self, num_tokens: int, num_past: int = 0) -> Calls:
        """Return how layers are called for ``num_tokens`` tokens after ``num_past`` others."""
        return self._record_calls(torch.zeros(num_tokens, dtype=torch.long), num_past)[1]

    @torch.no_grad()
    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return log probabilities of the next tokens, ``(tokens, vocabulary)`` float32, of the last layer's output."""
        last: list[Callable[..., Any]] = [lambda *args, **kwargs: self._returned(hidden[None].to(self.device))]
        logits = self._run(last * self.num_layers, torch.zeros(len(hidden), dtype=torch.long), 0).logits[0]
        return torch.log_softmax(logits.float(), -1)

    @contextmanager
    def layer(self, index: int) -> Iterator[Layer]:
        """Load the weights of a layer, and forget them at the end."""
        with self._loaded(index, lambda name: True) as module:
            layer = Layer(self, module, index)
            try:
                yield layer
            finally:
                layer.forget()

    @torch.no_grad()
    def _record_calls(self, ids: torch.Tensor, num_past: int) -> tuple[torch.Tensor, Calls]:
        """Return what the first layer gets, ``(1, tokens, hidden)``, and how layers are called."""
        noted: list[tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]] = []

        def record(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            noted.append((hidden, args, kwargs))
            return self._returned(hidden)

        def stop(module: Any, args: Any) -> None:
            raise _Stop

        with _stopped_by(self._model.get_output_embeddings().register_forward_pre_hook(stop)):
            self._run([record] * self.num_layers, ids, num_past)
        if len(noted) != self.num_layers or any(x.shape != noted[0][0].shape for x, _, _ in noted):
            raise UnsupportedError(f"{self.path}: it does not call each of its {self.num_layers} layers once")
        return noted[0][0], [(args, kwargs) for _, args, kwargs in noted]

    def _find_layers(self) -> tuple[Any, re.Pattern[str]]:
        """Return the list of layers, and what finds a layer's number in the name of a tensor."""
        if self._model.get_output_embeddings() is None:
            raise UnsupportedError(f"{self.path}: {type(self._model).__name__} has no output embeddings")
        lists = (x for x in self._model.get_decoder().named_modules() if isinstance(x[1], torch.nn.ModuleList))
        for name, layers in lists:
            if len(layers) == self.num_layers:
                return layers, re.compile(rf"(?:^|\.){re.escape(name.rpartition('.')[2])}\.(\d+)\.")
        raise UnsupportedError(
            f"{self.path}: {type(self._model).__name__} has no list of its {self.num_layers} decoder layers"
        )

    def _find_extras(self) -> int | None:
        """Return how many values the model expects from each layer beside the hidden states, in a tuple. None if it
        expects the hidden states alone."""
        refused: list[UnsupportedError] = []
        for self._extras in (None, 0, 1):
            try:
                self.calls(_SMALL_TOKENS)
                return self._extras
            except UnsupportedError as e:
                refused.append(e)
        raise refused[0]

    def _require_calls_of_any_tokens(self, ids: torch.Tensor) -> None:
        """Raise UnsupportedError if layers get arguments that depend on the tokens: `calls` has none of those."""
        for found, expected in zip(self._record_calls(ids, 0)[1], self.calls(len(ids)), strict=True):
            for x, y in zip((*found[0], *found[1].values()), (*expected[0], *expected[1].values()), strict=True):
                if isinstance(x, torch.Tensor) and not torch.equal(x, y):
                    raise UnsupportedError(f"{self.path}: its layers get more of each token than hidden states")

    def _open(self, files: list[str], packing: Packing | None) -> dict[int | None, dict[str, Any]]:
        """Return the checkpoint's tensors, which are read when used, by layer. Those of no layer are under None."""
        from safetensors import SafetensorError, safe_open

        found: dict[int | None, dict[str, Any]] = {}
        for file in files:
            if not file.endswith(".safetensors"):
                raise ConfigError(f"{file}: expected weights as safetensors")
            try:
                opened = self._open_files.enter_context(safe_open(file, framework="pt"))
                for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
                    match = self._layer_key.search(name)
                    found.setdefault(int(match[1]) if match else None, {})[name] = opened.get_slice(name)
            except (SafetensorError, OSError) as e:
                raise ConfigError(f"{file}: {e}") from e
        return {key: packing.plain(tensors) for key, tensors in found.items()} if packing else found

    @contextmanager
    def _loaded(self, index: int, wanted: Callable[[str], bool]) -> Iterator[Any]:
        """Put a copy of a layer into the model, with those weights that are wanted."""
        empty = self._layers[index]  # stays so: weights that are restored take the place of those that are packed
        self._layers[index] = module = copy.deepcopy(empty)
        try:
            self._load(index, wanted)
            _unpack(module)
            missing = [name for name, x in module.named_parameters() if x.is_meta and wanted(f".{name}")]
            if missing:
                raise ConfigError(f"{self.path}: the checkpoint lacks {missing[0]} of layer {index}")
            yield module
        finally:
            self._layers[index] = empty

    def _load(self, key: int | None, wanted: Callable[[str], bool]) -> set[str]:
        """Load tensors of a layer, or those of none; return the names that are missing in the model."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        tensors = {name: x for name, x in self._weights.get(key, {}).items() if wanted(name)}
        info, _ = convert_and_load_state_dict_in_model(self._model, tensors, self._load_config)
        for name, found, expected in info.mismatched_keys:
            raise ConfigError(f"{self.path}: {name} has the shape {tuple(found)}, expected {tuple(expected)}")
        for name, problem in info.conversion_errors.items():
            raise ConfigError(f"{self.path}: {name} cannot be read: {problem}")
        for parameter in (self._model if key is None else self._layers[key]).parameters():
            parameter.requires_grad_(False)
            if parameter.dtype in (torch.bfloat16, torch.float16) and not parameter.is_meta and key is not None:
                parameter.data = parameter.data.float()  # a quantised weight that was restored
        return set(info.missing_keys)

    def _load_rest(self, dtype: torch.dtype) -> None:
        """Load the embeddings, in ``dtype``, and the last norm.

        In the type that they have in the checkpoint, they are not copied on a CPU, but mapped from the file.
        """
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        for module in {embedding, head}:
            module.weight = torch.nn.Parameter(module.weight.to(dtype), requires_grad=False)
        self._model.tie_weights(missing_keys=self._load(None, lambda name: True))
        for name, x in self._model.named_parameters():
            if x.is_meta and not self._layer_key.search(name):
                raise ConfigError(f"{self.path}: the checkpoint lacks {name}")
        embedding.register_forward_hook(lambda module, args, output: output.float())
        head.forward = partial(_multiply_in_parts, head)

    def _returned(self, hidden: torch.Tensor) -> Any:
        """Return hidden states as the model expects them from a layer."""
        return hidden if self._extras is None else (hidden, *[None] * self._extras)

    def _run(self, layers: list[Callable[..., Any]], ids: torch.Tensor, num_past: int) -> Any:
        """Run the model with other layers."""
        for layer, forward in zip(self._layers, layers, strict=True):
            layer.forward = forward
        try:
            with _one_line(f"{self.path}: {self.names_of(range(self.num_layers))} cannot run one by one"):
                return self._model(
                    ids[None].to(self.device), past_key_values=_past(self.num_layers, num_past), use_cache=True
                )
        finally:
            for layer in self._layers:
                del layer.forward

    def _pool_of(self, number: int, past: Past) -> Pool:
        if isinstance(past, States):
            return Pool.STATE
        architectures = self._model.config.architectures or (type(self._model).__name__,)
        return Pool.NONE if past is None else pool_of_keys(architectures, self.config, number)

    def _probe_layers(self) -> list[Past]:
        """Return what each layer keeps of a token that is repeated. Only what a layer has up to its K and V is loaded.

        Raises UnsupportedError, naming the layers, if any of them keep something else.
        """
        calls = self.calls(_PROBE_TOKENS)
        hidden = self.embed(torch.full((_PROBE_TOKENS,), self.config.vocab_size // 2))
        found: list[Past] = []
        refused: dict[str, list[int]] = {}
        for index in range(self.num_layers):
            try:
                try:
                    found.append(self._probe_layer(index, hidden, calls, lambda name: not _NOT_ATTENTION.search(name)))
                except _NotPlainError:  # or attention is a mixture of experts itself
                    found.append(self._probe_layer(index, hidden, calls, lambda name: True))
            except _NotPlainError as e:
                refused.setdefault(str(e), []).append(index)
        if refused:
            reasons = "; ".join(f"{self.names_of(layers)} {reason}" for reason, layers in refused.items())
            raise UnsupportedError(f"{self.path}: a profile needs keys and values of plain attention, but {reasons}")
        return found

    def _probe_layer(self, index: int, hidden: torch.Tensor, calls: Calls, wanted: Callable[[str], bool]) -> Past:
        with self._loaded(index, wanted) as module:
            return Layer(self, module, index).kept(hidden, calls)

    def names_of(self, indices: Sequence[int]) -> str:
        """Return the numbers and kinds of some layers."""
        runs: list[list[int]] = []
        for i in indices:
            if runs and runs[-1][-1] == i - 1:
                runs[-1].append(i)
            else:
                runs.append([i])
        numbers = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
        types = getattr(self.config, "layer_types", None) or ()
        if len(types) != self.num_layers:
            types = [type(layer).__name__ for layer in self._layers]
        kinds = ", ".join(sorted({str(types[i]) for i in indices}))
        return f"layer{'s' if len(indices) > 1 else ''} {numbers} ({kinds}) of {self.num_layers}"


class Layer:
    """A decoder layer whose weights are loaded."""

    def __init__(self, model: LayeredModel, module: Any, index: int) -> None:
        self._model, self._module, self.index = model, module, index

    def forget(self) -> None:
        """Release the weights, also where a caller still has this layer while the next one is loaded."""
        del self._module
        self.__dict__.pop("_addend", None)

    def forward(self, hidden: torch.Tensor, calls: Calls) -> tuple[torch.Tensor, Past]:
        """Return the layer's output for the first tokens of a sequence, on the host, and what it keeps of them."""
        cache = _layer_cache(None)
        with torch.no_grad():
            return self._call(hidden, calls, cache).cpu(), self._past_of(cache)

    def after(self, hidden: torch.Tensor, calls: Calls, past: Past) -> torch.Tensor:
        """Return the layer's output for tokens that follow ``past``. Gradients flow to K and V."""
        if isinstance(past, KV):
            return self._call(hidden, calls, _layer_cache(self._to_cache(past), indexer=past.indexer))
        return self._call(hidden, calls, _layer_cache(None, past))

    def attention_after(self, hidden: torch.Tensor, calls: Calls, past: KV) -> torch.Tensor:
        """Return what attention adds to the stream at tokens that follow ``past``, or what stands for it (see
        `addend`). Gradients flow to ``past``."""
        addend = self._addend
        if addend is None:
            return self.after(hidden, calls, past)
        found: list[torch.Tensor] = []

        def take(x: torch.Tensor) -> None:
            found.append(x)
            raise _Stop

        with suppress(_Stop), addend.taken(take):
            self.after(hidden, calls, past)
        return found[0][0]

    @cached_property
    def _addend(self) -> Addend | None:
        """What attention adds to the stream; None if only the layer's whole output tells it."""
        hidden, calls = self._model.small

        def run(hidden: torch.Tensor) -> SmallPass:
            cache = _layer_cache(None, is_zero=True)
            output = self._call(hidden[0], calls, cache)
            return SmallPass(cache.new or (), output[None])

        return find_addend(self._module, hidden[None].to(self._model.device), run)

    @torch.no_grad()
    def kept(self, hidden: torch.Tensor, calls: Calls) -> Past:
        """Return what the layer keeps of a sequence's first tokens. What it has behind its attention is not computed.

        Raises _NotPlainError if that is neither keys and values, nor states alone.
        """
        cache = _layer_cache(None)
        running: list[bool] = []  # of each module that runs, whether it began before K and V were there

        def begin(module: Any, args: Any) -> None:
            if any(x.is_meta for x in module.parameters(recurse=False)):
                raise _Stop  # attention is loaded, so this is behind it, or there is none
            running.append(cache.new is None)

        def end(module: Any, args: Any, output: Any) -> None:
            if running.pop() and cache.new is not None:
                raise _Stop  # it is the one that computed K and V: attention

        with ExitStack() as hooks:
            for module in self._module.modules():
                hooks.callback(module.register_forward_pre_hook(begin).remove)
                hooks.callback(module.register_forward_hook(end).remove)
            with suppress(_Stop):
                self._call(hidden, calls, cache)
        return self._past_of(cache)

    def _call(self, hidden: torch.Tensor, calls: Calls, cache: Any) -> torch.Tensor:
        args, kwargs = calls[self.index]
        args = tuple(cache if _is_cache(x) else x for x in args)
        kwargs = {name: cache if _is_cache(x) else x for name, x in kwargs.items()}
        with _one_line(f"{self._model.path}: layer {self.index} does not run by itself"):
            output = self._module(hidden[None].to(self._model.device), *args, **kwargs)
        return main_output(output)[0]

    def _past_of(self, cache: Any) -> Past:
        if cache.states is not None:
            if cache.new is not None:
                raise _NotPlainError(_OTHER_STATES)
            return States(*({n: x.cpu() for n, x in states.items()} for states in cache.states))
        if cache.new is None and keeps_nothing(self._model.config, self.index):
            return None
        if cache.new is None or any(x.ndim != 4 for x in cache.new):
            raise _NotPlainError("keep no keys and values")
        k, v = (x[0].transpose(0, 1) for x in cache.new)
        if self._model._is_mla:
            k, v = latent_kv(k, v, self._model.config, self._model.path)
        return KV(k, v, None if cache.indexer is None else cache.indexer[0].cpu())

    def _to_cache(self, kv: KV) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = cached_latent(kv.k, kv.v, self._model.config) if self._model._is_mla else (kv.k, kv.v)
        device = self._model.device
        return k.to(device).float().transpose(0, 1)[None], v.to(device).float().transpose(0, 1)[None]


def latent_kv(latent: torch.Tensor, rotated: torch.Tensor, config: Any, path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V, ``(..., 1, dim)``, of what transformers caches with MLA. Raises UnsupportedError."""
    if (latent.shape[-2:], rotated.shape[-2]) != ((1, config.kv_lora_rank), 1):
        raise UnsupportedError(f"{path}: this version of transformers does not cache MLA's latent vectors")
    if getattr(config, "rope_interleave", False):  # it moved channels 2i and 2i + 1 to the two halves
        rotated = torch.stack(rotated.chunk(2, -1), -1).flatten(-2)
    return rotated, latent


def cached_latent(k: torch.Tensor, v: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo ``latent_kv``."""
    if getattr(config, "rope_interleave", False):
        k = torch.cat((k[..., ::2], k[..., 1::2]), -1)
    return v, k


class _Stop(Exception):
    """Ends a forward pass once the wanted values are known."""


class _NotPlainError(UnsupportedError):
    """A layer does not keep keys and values alone. The message has neither the layer nor the model."""


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn what the code of a model raises into UnsupportedError with one line that begins with ``what``."""
    try:
        yield
    except (_Stop, KVFetchError):
        raise
    except Exception as e:
        raise UnsupportedError(f"{what}: {_first_line(e)}") from e


def _first_line(e: BaseException) -> str:
    """Return the first line of an exception, and its type where that says more."""
    text = str(e).strip()
    first = text.splitlines()[0] if text else ""
    return first if first and isinstance(e, ImportError | OSError | ValueError) else f"{type(e).__name__}: {first}"


@contextmanager
def _stopped_by(hook: Any) -> Iterator[None]:
    """Let a torch hook raise _Stop, and remove it at the end."""
    try:
        with suppress(_Stop):
            yield
    finally:
        hook.remove()


def _layer_cache(
    past: tuple[torch.Tensor, torch.Tensor] | None,
    states: States | None = None,
    *,
    indexer: torch.Tensor | None = None,
    is_zero: bool = False,
) -> Any:
    """Return a cache for one call of one layer. ``new``: the keys and values that the layer gave it, ``indexer``:
    those of its indexer. ``states``: the states that it has now. None if the layer has none of these.

    With ``is_zero``, keys and values are replaced by zeros, which need gradients. Whatever else a layer does with its
    cache raises _NotPlainError.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionLayer

    class LayerCache(DynamicCache):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._kept = LinearAttentionLayer(number_of_states=_MOST_STATES)
            self.layers = _EveryLayer([self._kept])
            self.new: tuple[torch.Tensor, torch.Tensor] | None = None
            self.indexer: torch.Tensor | None = None
            for number, x in (states.conv if states else {}).items():
                self._kept.lazy_initialization(conv_states=x, state_idx=number)
                self._kept.conv_states[number].copy_(x)
                self._kept.has_previous_state[number] = True
            for number, x in (states.recurrent if states else {}).items():
                self._kept.lazy_initialization(recurrent_states=x, state_idx=number)
                self._kept.recurrent_states[number].copy_(x)
                self._kept.has_previous_state[number] = True

        @property
        def states(self) -> States | None:
            found = States(
                *(
                    {number: x for number, x in each.items() if x is not None}
                    for each in (self._kept.conv_states, self._kept.recurrent_states)
                )
            )
            return found if found.conv or found.recurrent else None

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if self.new is not None:
                raise _NotPlainError("keep keys and values twice")
            self.new = key_states, value_states
            if is_zero:
                self.new = torch.zeros_like(key_states), torch.zeros_like(value_states)
                for x in self.new:
                    x.requires_grad_(True)
            if past is None:
                return self.new
            return torch.cat((past[0], key_states), 2), torch.cat((past[1], value_states), 2)

        def has_previous_state(self, layer_idx: Any = None, state_idx: int | None = None) -> bool:
            numbers = range(_MOST_STATES) if state_idx is None else (state_idx,)
            return any(self._kept.has_previous_state[number] for number in numbers)

        def update_indexer(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.indexer = states  # (1, tokens, dim)
            return states if indexer is None else torch.cat((indexer[None].to(states), states), 1)

    return LayerCache()


def _is_cache(x: Any) -> bool:
    """Return whether an argument of a layer is the model's cache. Models name it differently."""
    return hasattr(x, "get_seq_length")


class _EveryLayer(list[Any]):
    """In the place of a cache's layers: the same one, whatever the number of the layer that runs."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)


def _past(num_layers: int, num_tokens: int) -> Any:
    """Return a cache that is ``num_tokens`` long, with a channel that nothing reads."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(num_layers if num_tokens else 0):
        cache.update(torch.zeros(1, 1, num_tokens, 1), torch.zeros(1, 1, num_tokens, 1), layer)
    return cache


def _without_weights(path: str, config: Any, device: str) -> tuple[Any, list[str], Any, torch.dtype]:
    """Return a model without weights, the checkpoint's files, how transformers would load them, and their type."""
    from transformers.utils.loading_report import LoadStateDictInfo

    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict):  # plain weights have gradients on every device
        quantization |= _PLAIN_WEIGHTS.get(str(quantization.get("quant_method")), {})
    dtype = config.get_text_config().dtype or torch.float32  # loading changes it
    cls = _class_of(path, config)
    found: list[Any] = []

    def load_nothing(model: Any, state_dict: Any, files: Any, load_config: Any, expected_keys: Any = None) -> Any:
        found.extend((files, load_config))
        return LoadStateDictInfo(set(), set(), set(), [], {}, set()), None

    changes = {"_load_pretrained_model": staticmethod(load_nothing), "__module__": cls.__module__}
    own: Any = type(cls.__name__, (cls,), changes)
    model = own.from_pretrained(path, config=config, dtype=torch.float32)
    files, load_config = found
    if hasattr(model, "ct_decompress_hook"):  # of compressed-tensors: it would unpack all layers at the first call
        model.ct_decompress_hook.remove()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer if buffer.is_meta else buffer.to(device))
    return model.eval(), files, dataclasses.replace(load_config, device_map={"": device}), dtype


def _class_of(path: str, config: Any) -> Any:
    """Return the class of a language model, alone or with encoders, as its config names it. Raises UnsupportedError."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    found = []
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        with suppress(KeyError):
            found.append(auto._model_mapping[type(config)])
    if not found:
        raise UnsupportedError(f"{path}: transformers has no language model of the type {config.model_type!r}")
    # Some types have one for the text alone, too, whose weights have other names in a checkpoint.
    return next((cls for cls in found if cls.__name__ in (config.architectures or ())), found[0])


def _empty_encoders(model: Any) -> None:
    """Empty the modules beside the language model, if the model is more than that."""
    if model.config.get_text_config() is model.config:
        return
    decoder = model.get_decoder()
    needed = {decoder, model.get_input_embeddings(), model.get_output_embeddings()}
    for parent in [x for x in model.modules() if x is not decoder and decoder in set(x.modules())]:
        for name, child in parent.named_children():
            if needed.isdisjoint(child.modules()):
                setattr(parent, name, torch.nn.Module())


def _unpack(layer: Any) -> None:
    """Restore the weights that are packed as by llm-compressor, where they are loaded."""
    packed = [x for x in layer.modules() if hasattr(x, "quantization_scheme")]
    if packed:
        from compressed_tensors.compressors import decompress_module

        for module in packed:
            if not any(x.is_meta for x in module.parameters(recurse=False)):
                decompress_module(module)
                module.__dict__.pop("forward", None)  # which would quantise once more, and activations, too
                for x in module.parameters(recurse=False):
                    x.requires_grad_(False)


def _multiply_in_parts(head: Any, x: torch.Tensor) -> torch.Tensor:
    """Multiply as a linear layer does. Convert only a part of the weights to the type of ``x`` at a time."""
    parts = [torch.nn.functional.linear(x, w.to(x.dtype)) for w in head.weight.split(_VOCABULARY_AT_ONCE)]
    return torch.cat(parts, -1) if head.bias is None else torch.cat(parts, -1) + head.bias


def type_of(config: Any, layer: int) -> str:
    """Return the type of a layer, as a model's config names it; "" if it does not."""
    types = getattr(config, "layer_types", None) or ()
    return str(types[layer]) if layer < len(types) else ""


def keeps_nothing(config: Any, layer: int) -> bool:
    """Return whether a layer that caches nothing has nothing to cache. Others read another layer's K and V."""
    return type_of(config, layer) in _KEEPS_NOTHING


def pool_of_keys(architectures: Sequence[str], config: Any, layer: int) -> Pool:
    """Return the pool of a layer that keeps keys and values. ``config``: of the text model."""
    has_window = type_of(config, layer) in _SLIDING or _is_in_pattern(config, layer)
    return Pool.WINDOW if has_window and not WINDOWS_APART.isdisjoint(architectures) else Pool.KV


def _is_in_pattern(config: Any, layer: int) -> bool:
    """Return whether a layer has a window in MiMo V2's ``hybrid_layer_pattern``."""
    pattern = getattr(config, "hybrid_layer_pattern", None) or ()
    return layer < len(pattern) and pattern[layer] == 1
