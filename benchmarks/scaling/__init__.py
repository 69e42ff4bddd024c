"""Models many servers on one S3 store with an index: how much of what they need, and which limit they reach first."""
