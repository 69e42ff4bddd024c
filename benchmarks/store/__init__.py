"""Measures ``kvfetch serve`` from outside: see ``__main__``."""
