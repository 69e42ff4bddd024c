"""Get a profile for a server that has none: from the store, or by calibrating on its own prompts."""
