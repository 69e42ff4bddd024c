"""The stored format of a segment, which ``docs/format.md`` describes for other implementations.

Writers and encoders pack cells and side pages here; readers, stores and tools open what came from a store. Nothing here
does I/O, and nothing that came is trusted: it is bounded before anything is allocated for it, or raises FormatError.
"""
