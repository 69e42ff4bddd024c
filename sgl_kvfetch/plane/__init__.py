"""The data plane: everything between the engine and the store, in a process beside the engine's, one a rank.

It looks up, fetches, decodes and restores pages, and chooses how to read them (``fetch``), gathers, encodes and writes
segments (``write``).

It knows stores, the codec and the protocol. It imports neither the engine's half nor sglang, and takes nothing for
granted about the process at the other end: if either dies, the other one goes on.
"""
