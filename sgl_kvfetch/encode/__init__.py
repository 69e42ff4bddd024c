"""Coding stored segments again, in the background: from a fast codec to the variants that readers want."""
