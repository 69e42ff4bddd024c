"""Compares the bits and accuracy of KV cache codecs, ours and others': ``python -m benchmarks.codec``."""
