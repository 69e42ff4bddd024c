"""Opens the houses' doors: each name that a stub exports is imported at its first use.

CONTRIBUTING.md says why. `lazy_loader` reads the stub, and what it lacks is an error that says what
happened. A module that fails with an AttributeError, as one does whose package is too old, would have Python say
"cannot import name 'Store' from 'sgl_kvfetch.stores'": a ``from ... import`` takes the error of a module's
``__getattr__`` for the news that it has no such name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lazy_loader


def open_door(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package: the names in the stub beside its ``file``.

    ``__getattr__`` raises ImportError, with the cause in its text, for a name whose module cannot be imported.
    """
    import_name, names, exported = lazy_loader.attach_stub(package, file)

    def get(name: str) -> Any:
        if name not in exported:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return import_name(name)
        except AttributeError as error:
            raise ImportError(f"{package}.{name} cannot be imported: {error}", name=package) from error

    return get, names, exported
