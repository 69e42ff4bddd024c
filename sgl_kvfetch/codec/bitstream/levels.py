"""What manifests say of levels. A store, which reads manifests, has neither numpy nor torch, so this is not in `ladder`."""

LADDER, DIGITS = "ladder", "digits"  # the codecs of level 0, and of the others
MOST_LEVELS = 4
