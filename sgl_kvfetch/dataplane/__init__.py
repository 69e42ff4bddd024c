"""Network I/O, lookups, verification, decoding, encoding and writing, in a process beside SGLang's scheduler."""
