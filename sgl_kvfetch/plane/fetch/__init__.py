"""Fetches pages: looks them up, reads, decodes and restores them."""
