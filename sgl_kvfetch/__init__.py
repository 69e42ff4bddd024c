"""KV caches of SGLang on a store in your network, at two thirds of their size or a tenth."""

__version__ = "0.2.0"
