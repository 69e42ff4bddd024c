from .app import create_app as create_app
from .config import ServerConfig as ServerConfig
from .run import run_server as run_server
