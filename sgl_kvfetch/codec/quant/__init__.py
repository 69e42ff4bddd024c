"""Quantisers between KV values and 8-bit integers."""
