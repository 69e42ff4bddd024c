"""Everything that touches SGLang. Nothing else in the package imports it."""
