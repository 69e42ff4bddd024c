"""The plugin: everything that touches SGLang, and nothing else does.

``host`` is SGLang's storage backend for its host tier, ``device`` fetches into the token-to-KV pool and parks requests
that wait. ``seams`` lists every hook.

It knows SGLang, the data plane and the codec. It never opens a store, does no I/O on the scheduler's
thread, and installs nothing unless a launch selects the backend.
"""
