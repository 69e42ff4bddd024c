"""The stored format of a segment, sans-IO. ``docs/format.md`` describes it for other implementations."""
