"""A pytest plugin (``-p tests.benchmarks.without_sglang``) that makes SGLang look as if it were not installed."""

import sys

sys.modules["sglang"] = None  # type: ignore[assignment]
