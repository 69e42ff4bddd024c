"""Records a wrapper's kernel launch without running it, to get the source and options for the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.compiler import ASTSource

_POINTER = {
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
}


class Recorder:
    """Replaces a kernel, and records its launch arguments as Triton would specialise them. ``arguments``: those that
    are not constants."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.source: ASTSource | None = None
        self.options: dict[str, Any] = {}
        self.arguments: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        names = [p.name for p in self.kernel.params]
        values = {**dict(zip(names, args, strict=False)), **{k: v for k, v in kwargs.items() if k in names}}
        self.options = {k: v for k, v in kwargs.items() if k not in names}
        passed = [values[param.name] for param in self.kernel.params if not param.is_constexpr]
        self.arguments = [leaf for value in passed for _, leaf in leaves_of(value, ())]
        signature, constants, attributes = {}, {}, {}
        for i, param in enumerate(self.kernel.params):
            value = values[param.name]
            if param.is_constexpr or value is None:
                signature[param.name] = "constexpr"
                constants[(i,)] = value
                continue
            signature[param.name] = _type(value)
            for path, leaf in leaves_of(value, (i,)):
                if _is_specialised(param, leaf):
                    attributes[path] = [["tt.divisibility", 16]]
        self.source = ASTSource(self.kernel, signature, constants, attributes)


@contextmanager
def recording(module: Any, kernel: str) -> Iterator[Recorder]:
    original = getattr(module, kernel)
    recorder = Recorder(original)
    setattr(module, kernel, recorder)
    try:
        yield recorder
    finally:
        setattr(module, kernel, original)


def _type(value: Any) -> Any:
    match value:
        case tuple():
            return tuple(map(_type, value))
        case torch.Tensor():
            return _POINTER[value.dtype]
        case float():
            return "fp32"
        case int():
            return "i32" if value < 2**31 else "i64"
    raise TypeError(type(value))


def _is_specialised(param: Any, leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return not param.do_not_specialize_on_alignment and leaf.data_ptr() % 16 == 0
    return isinstance(leaf, int) and leaf % 16 == 0 and not param.do_not_specialize


def leaves_of(value: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yield an argument's values with their paths. Tuples are passed value by value."""
    if isinstance(value, tuple):
        for i, x in enumerate(value):
            yield from leaves_of(x, (*path, i))
    else:
        yield path, value
