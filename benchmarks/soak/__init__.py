"""Hours of a store's life in minutes: see ``__main__``."""
