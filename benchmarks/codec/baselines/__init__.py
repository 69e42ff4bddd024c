"""Other authors' methods, one module each, as close to the source as it allows."""
