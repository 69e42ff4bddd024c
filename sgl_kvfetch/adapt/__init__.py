"""Which variant of each chunk to fetch, so that neither the link nor the decoders wait for the other.

Pure, but for the thread pool: estimates, profiles and policies are functions of frozen values, without clock or I/O.
"""
