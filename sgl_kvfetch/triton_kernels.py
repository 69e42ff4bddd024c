"""Expose the kernels of the top-level folder `triton_kernels/` as the package ``sgl_kvfetch.triton_kernels``.

An installed wheel has them beside this file; a checkout (or an editable install) has them one level up. That folder has
no ``__init__.py``, and nothing puts it on the import path: ``triton_kernels`` is also another project's name.
"""

from pathlib import Path

_installed = Path(__file__).with_suffix("")
_checkout = Path(__file__).parent.parent / "triton_kernels"

# A module with a `__path__` is a package: this makes the folder's modules importable under our name.
__path__ = [str(_installed if _installed.is_dir() else _checkout)]
