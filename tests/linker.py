"""Whether the SGLang that is tested has the linker that device mode needs."""

from __future__ import annotations

import pytest

from sgl_kvfetch.plugin.versions import WITH_LINKER, installed_version

HAS_LINKER = installed_version() in WITH_LINKER
needs_linker = pytest.mark.skipif(not HAS_LINKER, reason=f"device mode needs SGLang {WITH_LINKER[0]}")
