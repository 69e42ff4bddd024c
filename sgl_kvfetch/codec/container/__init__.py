"""The stored format of a segment, without I/O. ``docs/format.md`` describes it for other implementations."""
