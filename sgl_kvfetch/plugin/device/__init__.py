"""Device mode: from the store straight into SGLang's token-to-KV pool, without a host tier."""
