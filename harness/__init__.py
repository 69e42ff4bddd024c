"""SGLang, a store and small models, for tests and benchmarks."""
