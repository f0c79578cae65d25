"""A relay: the wire between two hosts, where both are projects of one engine.

Docker drops what a container of one bridge sends to a published port of another bridge, so it goes
through a process of the host.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import socketserver
import threading

CONNECT_DEADLINE_S = 5.0


class _Handler(socketserver.BaseRequestHandler):
    """One connection: bytes of each side to the other, until one of them ends."""

    server: Relay

    def handle(self) -> None:
        try:
            target = socket.create_connection(self.server.target, timeout=CONNECT_DEADLINE_S)
        except OSError:
            return
        target.settimeout(None)
        peers = {self.request: target, target: self.request}
        with target, selectors.DefaultSelector() as selector, contextlib.suppress(OSError):
            for side in peers:
                selector.register(side, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    side = key.fileobj
                    assert isinstance(side, socket.socket)
                    data = side.recv(65536)
                    if not data:
                        return
                    peers[side].sendall(data)


class Relay(socketserver.ThreadingTCPServer):
    """Listens on a free port of an address; use it in `with`."""

    daemon_threads = True

    def __init__(self, address: str, target: tuple[str, int]) -> None:
        super().__init__((address, 0), _Handler)
        self.target = target
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, name="relay", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
