"""Bits and accuracy of ways to code KV caches, ours and others', side by side: ``python -m benchmarks.codec``."""
