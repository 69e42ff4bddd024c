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
those of a given past. So it does not matter how attention is written, as long as it has keys and values to cache.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from sgl_kvfetch.codec.calibrate.packed import Packing, take_packing
from sgl_kvfetch.codec.calibrate.text import prompt_start
from sgl_kvfetch.errors import ConfigError, UnsupportedError

_PROBE_TOKENS = 64
_VOCABULARY_AT_ONCE = 8192  # rows of the output matrix that are in float32 at once
# What tells transformers to restore weights that are quantised in the checkpoint while it loads them.
_PLAIN_WEIGHTS = {
    "fp8": {"dequantize": True},
    "mxfp4": {"dequantize": True},
}
_NOT_ATTENTION = re.compile(r"\.(mlp|experts|feed_forward|block_sparse_moe)\.")


class KV(NamedTuple):
    """Keys and values of one layer, ``(tokens, heads, dim)``. Keys are rotated, as in SGLang's pools. With MLA, K is
    the rotated part of the one vector that a token has in a layer, and V is the rest, the latent vector."""

    k: torch.Tensor
    v: torch.Tensor


Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]
"""How a model calls each of its layers: arguments behind the hidden states, and named ones."""


class LayeredModel:
    """A causal language model with full attention, sliding windows or MLA. It computes in float32.

    Attributes: ``num_layers``, ``num_heads``, ``k_head_dim``, ``v_head_dim``: the shape of K and V. ``probe``: the keys
    of one token that is repeated, float32 ``(tokens, layers, heads, dim)``; see ``find_rope``.
    """

    def __init__(self, path: str, *, device: str = "cpu") -> None:
        """``path``: anything that transformers loads from safetensors.

        Raises ConfigError if nothing can be loaded, UnsupportedError if the layers have no plain K and V.
        """
        try:
            import transformers
        except ImportError as e:
            raise ConfigError(
                f"this needs transformers, which is not installed: pip install 'sgl-kvfetch[bench]' ({e})"
            ) from e
        transformers.utils.logging.disable_progress_bar()
        self.path = path
        self.device = device
        try:
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
            config = transformers.AutoConfig.from_pretrained(path)
            packing = take_packing(path, config)
            self._model, files, self._load_config, dtype = _without_weights(path, config, device)
        except ImportError as e:  # of a package that restores quantised weights
            raise ConfigError(f"{path}: {str(e).strip().splitlines()[0]}") from e
        except (OSError, ValueError, KeyError) as e:
            raise ConfigError(f"no model with a tokenizer at {path!r}: {str(e).splitlines()[0]}") from e
        self.start = prompt_start(self.tokenizer)
        self.config: Any = self._model.config.get_text_config()
        self._is_mla = getattr(self.config, "kv_lora_rank", None) is not None
        self.num_layers: int = self.config.num_hidden_layers
        self._layers, self._layer_key = self._find_layers()
        self._open_files = ExitStack()
        self._weights = self._open(files, packing)
        self._load_rest(dtype)
        keys = list(self._probe_layers())
        if len({(kv.k.shape, kv.v.shape) for kv in keys}) != 1:
            raise UnsupportedError(f"{path}: its layers have keys and values of different shapes")
        self.probe = torch.stack([kv.k for kv in keys], dim=1).float().cpu()
        self.num_heads, self.k_head_dim = keys[0].k.shape[1:]
        self.v_head_dim = keys[0].v.shape[2]

    def inverse_frequencies(self) -> list[torch.Tensor]:
        """Return the model's buffers of rotary frequencies, one number a pair of channels. Most models have them."""
        return [x for name, x in self._model.named_buffers() if name.rpartition(".")[2] == "inv_freq"]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return what the first layer gets for a sequence, float32 ``(tokens, hidden)``."""
        return self._note_calls(ids, 0)[0][0].float().cpu()

    def calls(self, num_tokens: int, num_past: int = 0) -> Calls:
        """Return how layers are called for ``num_tokens`` tokens after ``num_past`` others."""
        return self._note_calls(torch.zeros(num_tokens, dtype=torch.long), num_past)[1]

    @torch.no_grad()
    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return log probabilities of the next tokens, ``(tokens, vocabulary)`` float32, of the last layer's output."""
        last: list[Callable[..., torch.Tensor]] = [lambda *args, **kwargs: hidden[None].to(self.device)]
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
    def _note_calls(self, ids: torch.Tensor, num_past: int) -> tuple[torch.Tensor, Calls]:
        """Return what the first layer gets, ``(1, tokens, hidden)``, and how layers are called."""
        noted: list[tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]] = []

        def note(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            noted.append((hidden, args, kwargs))
            return hidden

        def stop(module: Any, args: Any) -> None:
            raise _Stop

        with _stopped_by(self._model.get_output_embeddings().register_forward_pre_hook(stop)):
            self._run([note] * self.num_layers, ids, num_past)
        if len(noted) != self.num_layers:
            raise UnsupportedError(f"{self.path}: it does not call each of its {self.num_layers} layers once")
        return noted[0][0], [(args, kwargs) for _, args, kwargs in noted]

    def _find_layers(self) -> tuple[Any, re.Pattern[str]]:
        """Return the list of layers, and what finds a layer's number in the name of a tensor."""
        lists = (x for x in self._model.get_decoder().named_modules() if isinstance(x[1], torch.nn.ModuleList))
        for name, layers in lists:
            if len(layers) == self.num_layers:
                return layers, re.compile(rf"(?:^|\.){re.escape(name.rpartition('.')[2])}\.(\d+)\.")
        raise UnsupportedError(f"{self.path}: no list of its {self.num_layers} decoder layers was found")

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
        embedding.register_forward_hook(lambda module, args, output: output.float())
        head.forward = partial(_multiply_in_parts, head)

    def _run(self, layers: list[Callable[..., torch.Tensor]], ids: torch.Tensor, num_past: int) -> Any:
        """Run the model with other layers."""
        for layer, forward in zip(self._layers, layers, strict=True):
            layer.forward = forward
        try:
            return self._model(
                ids[None].to(self.device), past_key_values=_past(self.num_layers, num_past), use_cache=True
            )
        finally:
            for layer in self._layers:
                del layer.forward

    def _probe_layers(self) -> Iterator[KV]:
        """Yield each layer's K and V of a token that is repeated. Only what a layer has up to its K and V is loaded."""
        calls = self.calls(_PROBE_TOKENS)
        hidden = self.embed(torch.full((_PROBE_TOKENS,), self.config.vocab_size // 2))
        for index in range(self.num_layers):
            with self._loaded(index, lambda name: not _NOT_ATTENTION.search(name)) as module:
                yield Layer(self, module, index).keys_and_values(hidden, calls)


class Layer:
    """A decoder layer whose weights are loaded."""

    def __init__(self, model: LayeredModel, module: Any, index: int) -> None:
        self._model, self._module, self.index = model, module, index

    def forget(self) -> None:
        """Release the weights, also where a caller still has this layer while the next one is loaded."""
        del self._module

    def forward(self, hidden: torch.Tensor, calls: Calls) -> tuple[torch.Tensor, KV]:
        """Return the layer's output for the first tokens of a sequence, on the host, and their keys and values."""
        cache = _layer_cache(None)
        with torch.no_grad():
            return self._call(hidden, calls, cache).cpu(), self._kv_of(cache)

    def after(self, hidden: torch.Tensor, calls: Calls, past: KV) -> torch.Tensor:
        """Return the layer's output for tokens that follow ``past``. Gradients flow to ``past``."""
        return self._call(hidden, calls, _layer_cache(self._to_cache(past)))

    def attention_after(self, hidden: torch.Tensor, calls: Calls, past: KV) -> torch.Tensor:
        """Return what attention adds to the stream at tokens that follow ``past``. Gradients flow to ``past``."""
        found: list[torch.Tensor] = []

        def stop(module: Any, args: Any, output: Any) -> None:
            found.append(output[0] if isinstance(output, tuple) else output)
            raise _Stop

        with _stopped_by(self._attention.register_forward_hook(stop)):
            self.after(hidden, calls, past)
        return found[0][0]

    @property
    def _attention(self) -> Any:
        """The module that hands keys and values to the cache, which it tells the number of its layer."""
        return next(x for x in reversed(list(self._module.modules())) if hasattr(x, "layer_idx"))

    @torch.no_grad()
    def keys_and_values(self, hidden: torch.Tensor, calls: Calls) -> KV:
        """Return K and V of a sequence's first tokens. The rest of the layer is not computed."""
        cache = _layer_cache(None, stops=True)
        with suppress(_Stop):
            self._call(hidden, calls, cache)
        return self._kv_of(cache)

    def _call(self, hidden: torch.Tensor, calls: Calls, cache: Any) -> torch.Tensor:
        args, kwargs = calls[self.index]
        own_args = [cache if hasattr(x, "get_seq_length") else x for x in args]  # a cache
        if "past_key_values" in kwargs:
            kwargs = kwargs | {"past_key_values": cache}
        output = self._module(hidden[None].to(self._model.device), *own_args, **kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        return hidden[0]

    def _kv_of(self, cache: Any) -> KV:
        if cache.new is None or any(x.ndim != 4 for x in cache.new):
            raise UnsupportedError(f"{self._model.path}: its cache does not hold keys and values of plain attention")
        k, v = (x[0].transpose(0, 1) for x in cache.new)
        return KV(*latent_kv(k, v, self._model.config, self._model.path)) if self._model._is_mla else KV(k, v)

    def _to_cache(self, kv: KV) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = cached_latent(*kv, self._model.config) if self._model._is_mla else kv
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


@contextmanager
def _stopped_by(hook: Any) -> Iterator[None]:
    """Let a torch hook raise _Stop, and remove it at the end."""
    try:
        with suppress(_Stop):
            yield
    finally:
        hook.remove()


def _layer_cache(past: tuple[torch.Tensor, torch.Tensor] | None, *, stops: bool = False) -> Any:
    """Return a cache for one call of one layer. ``new``: the keys and values that the layer gave it.

    With ``stops``, its `update` raises _Stop.
    """
    from transformers import DynamicCache

    class LayerCache(DynamicCache):  # type: ignore[misc]
        new: tuple[torch.Tensor, torch.Tensor] | None = None

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.new = key_states, value_states
            if stops:
                raise _Stop
            if past is None:
                return self.new
            return torch.cat((past[0], key_states), 2), torch.cat((past[1], value_states), 2)

    return LayerCache()


def _past(num_layers: int, num_tokens: int) -> Any:
    """Return a cache that is ``num_tokens`` long, with a channel that nothing reads."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(num_layers if num_tokens else 0):
        cache.update(torch.zeros(1, 1, num_tokens, 1), torch.zeros(1, 1, num_tokens, 1), layer)
    return cache


def _without_weights(path: str, config: Any, device: str) -> tuple[Any, list[str], Any, torch.dtype]:
    """Return a model without weights, the checkpoint's files, how transformers would load them, and their type."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.loading_report import LoadStateDictInfo

    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict):  # plain weights have gradients on every device
        quantization |= _PLAIN_WEIGHTS.get(str(quantization.get("quant_method")), {})
    dtype = config.get_text_config().dtype or torch.float32  # loading changes it
    cls: Any = AutoModelForCausalLM._model_mapping[type(config)]  # raises KeyError for what is no language model
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
