"""``kvfetch serve``: a directory behind HTTP, with tokens, TLS, limits, metrics, and a web UI.

`running_server` starts one in this process; ``run`` is what the command does. docs/openapi.yaml describes the
interface, and ``stores.wire`` has what client and server share.

It knows a directory and the protocol. It neither imports torch nor decodes what it stores; it never blocks its event
loop on the disk.
"""
