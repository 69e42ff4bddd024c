"""The embedded store: a local store behind HTTP."""

from sgl_kvfetch.server.app import create_app
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import RunningServer, run_server, running_server

__all__ = ["RunningServer", "ServerConfig", "create_app", "run_server", "running_server"]
