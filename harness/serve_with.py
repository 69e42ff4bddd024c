"""Run ``kvfetch`` with settings of a server that the command line does not have, from the root of a checkout:

python -m harness.serve_with '{"orphan_age_s": 5}' serve DIRECTORY ...
"""

from __future__ import annotations

import json
import sys
from functools import partial
from unittest.mock import patch

from sgl_kvfetch.server import config
from sgl_kvfetch.tools import main

if __name__ == "__main__":
    settings = json.loads(sys.argv.pop(1))
    with patch.object(config, "ServerConfig", partial(config.ServerConfig, **settings)):
        main()
