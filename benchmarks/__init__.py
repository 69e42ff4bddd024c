"""Demonstrations and measurements against real SGLang servers. Run from the repository's root, as modules."""
