"""Calibration of the ``klt`` quantiser: what a model's KV cache looks like, and how much its errors matter."""
