"""A hook of mkdocs: the site has what its pages link to outside of docs/, such as the changelog and the alert rules.

In the repository, a page links to such a file by its place there. On the site, the file lies in ``repository/`` under
the same name, and links lead to it. mkdocs then checks them like all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
_DOCS, _OUTSIDE = "docs/", "repository/"
_CODE_OR_LINK = re.compile(r"^```.*?^```|(?<=\]\()(?![a-z]+:)([^)#\s]+)(?=[^)\s]*\))", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to outside of docs/, and what that links to."""
    waiting = [_DOCS + file.src_uri for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in set(_targets(page)) - seen:
            seen.add(target)
            if target.startswith(_DOCS) or not (ROOT / target).is_file():
                continue
            name = _OUTSIDE + target
            path = str(ROOT / target)
            files.append(File.generated(config, name, abs_src_path=path, inclusion=InclusionLevel.NOT_IN_NAV))
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let a page's links lead to where their targets lie on the site."""
    name = page.file.src_uri
    place = _in_repository(name)

    def on_site(match: re.Match[str]) -> str:
        if not match[1]:
            return match[0]
        target = normpath(join(dirname(place), match[1]))
        return relpath(target.removeprefix(_DOCS) if target.startswith(_DOCS) else _OUTSIDE + target, dirname(name))

    return _CODE_OR_LINK.sub(on_site, markdown)


def _in_repository(name: str) -> str:
    return name.removeprefix(_OUTSIDE) if name.startswith(_OUTSIDE) else _DOCS + name


def _targets(page: str) -> Iterator[str]:
    for match in _CODE_OR_LINK.finditer((ROOT / page).read_text()):
        if match[1]:
            yield normpath(join(dirname(page), match[1]))
