"""What manifests say of levels, apart from their coder: a store reads manifests, and has neither numpy nor torch."""

LADDER, DIGITS = "ladder", "digits"  # the codecs of level 0, and of the others
MOST_LEVELS = 4
