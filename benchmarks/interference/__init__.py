"""Measures how fetches slow down requests that need no fetch."""
