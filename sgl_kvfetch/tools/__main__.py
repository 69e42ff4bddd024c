"""``python -m sgl_kvfetch.tools`` runs the command ``kvfetch``."""

from sgl_kvfetch.tools import main

main()
