"""``python -m sgl_kvfetch.cli`` runs the command ``kvfetch``."""

from sgl_kvfetch.cli import main

main()
