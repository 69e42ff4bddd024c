"""SGLang KV caches on remote storage, as losslessly coded video."""

__version__ = "0.2.0"
