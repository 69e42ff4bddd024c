"""Adaptive fetching, simulated: policies against fixed resolutions and against an oracle."""
