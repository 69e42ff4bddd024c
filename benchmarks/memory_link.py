"""A data plane whose link is no limit: what it has received once, it copies from memory from then on.

`benchmarks.data_plane --coded --without-link` runs it in the place of `sgl_kvfetch.plane`. Copying is one call of the
kernel's a read, as receiving is, on the same threads. So all that the data plane does for a read remains, but for the
sockets.
"""

import os
import socket

from sgl_kvfetch.plane.__main__ import main
from sgl_kvfetch.stores import transfers

_received: dict[bytes, int] = {}  # by a request's head: an open file in memory


class _ReadFromMemory(transfers._Read):
    def run(self, sock: socket.socket) -> bool:
        if (file := _received.get(self._head)) is not None:
            self.has_answered = self.is_kept = True
            while self._left:
                self._took(os.preadv(file, self._left[: transfers._MOST_PIECES], self.num_received))
            return True
        pieces = list(self._left)
        if is_range := super().run(sock):
            file = os.memfd_create("received")
            for piece in pieces:
                os.write(file, piece)
            _received[self._head] = file
        return is_range


transfers._Read = _ReadFromMemory  # type: ignore[misc]

if __name__ == "__main__":
    main()
