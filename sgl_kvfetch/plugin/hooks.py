"""The functions that SGLang runs for us. `seams.py` says where each one is put, and why.

Arguments come as SGLang passes them; hooks that follow a call get its result first. They do nothing unless the storage
backend in question is ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

BACKEND = "kvfetch"


def allow_choice(result: None, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
    """After ``ServerArgs.add_cli_args``: let ``--hicache-storage-backend`` take our name."""
    for action in parser._actions:
        if action.dest == "hicache_storage_backend" and action.choices is not None:
            if BACKEND not in action.choices:
                action.choices = [*action.choices, BACKEND]
            return


def gate_command_line(server_args: Any, argv: list[str]) -> None:
    """After ``prepare_server_args``: stop the command with one message if the launch cannot work.

    Raises ``SystemExit``: on the command line a traceback would only hide the message.
    """
    from sgl_kvfetch.errors import KVFetchError
    from sgl_kvfetch.plugin.gate import check_launch

    try:
        check_launch(server_args)
    except KVFetchError as error:
        raise SystemExit(f"sgl_kvfetch: {error}") from error


def gate_launch(server_args: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before ``ServerArgs.resolve_once``: raise the domain error of a launch that cannot work to the caller."""
    from sgl_kvfetch.plugin.gate import check_launch

    check_launch(server_args)
    return None


def create_backend(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    storage_config: Any,
    mem_pool_host: Any,
    **kwargs: Any,
) -> Any:
    """Around ``StorageBackendFactory._do_create_backend``: build ours, leave the others to SGLang."""
    if backend_name != BACKEND:
        return original(factory, backend_name, storage_config, mem_pool_host, **kwargs)
    from sgl_kvfetch.plugin.storage import KVFetchStorage

    return KVFetchStorage(storage_config, mem_pool_host)


def use_zero_copy(result: None, controller: Any, *args: Any, **kwargs: Any) -> None:
    """After ``HiCacheController.attach_storage_backend``: move pages with ``batch_get_v1`` and ``batch_set_v1``.

    The storage threads run already, but nothing is queued before the scheduler sees the attachment succeed.
    """
    if controller.storage_backend_type == BACKEND:
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy


def pass_prefix_keys(
    attachment: Any, *, storage_backend: str | None, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before ``StorageAttachment.apply_runtime_config``: have writes say which pages come before them.

    The number of them is a page's position, and the last of them what a segment follows on.
    """
    if storage_backend == BACKEND:
        kwargs["hicache_storage_pass_prefix_keys"] = True
    return (attachment,), {"storage_backend": storage_backend, **kwargs}
