"""Simulates adaptive fetching: policies against fixed resolutions and against an oracle."""
