"""Choose the variant of each chunk to fetch, so that neither the link nor the decoders wait for the other.

Except for the thread pool, this package is pure: estimates, profiles and policies use no clock and no I/O.
"""
