"""Measures the time to first token of multi-turn conversations with SGLang, and how much the cache saves."""
