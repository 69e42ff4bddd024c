"""Lossless codecs between frames and bitstreams: one file a codec. The manifest records their names."""
