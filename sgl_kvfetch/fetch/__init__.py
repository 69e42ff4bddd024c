"""From a lookup to restored pages."""
