"""Transcode stored segments in the background, from a fast codec to the variants that readers want."""
