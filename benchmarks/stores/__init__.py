"""Measures a hit of one prefix on each kind of store: requests, round trips, time, and what the requests would cost."""
