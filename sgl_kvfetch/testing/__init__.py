"""Helpers for tests, demonstrations and benchmarks that run a real SGLang."""
