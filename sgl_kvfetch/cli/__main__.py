"""``python -m sgl_kvfetch.cli``: the same as ``kvfetch``."""

from sgl_kvfetch.cli import main

main()
