"""Device mode through SGLang's linker: a prompt is staged in shared memory first, and loaded when it is admitted."""
