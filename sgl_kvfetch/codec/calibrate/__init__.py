"""Calibrate the ``klt`` quantiser: measure how a model's KV cache varies and how much errors in it cost."""
