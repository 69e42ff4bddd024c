"""SGLang, stores with faults, and small models, for tests and benchmarks."""
