"""What a door says when the module behind it cannot be imported."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A house whose door exports a name, one whose module needs a newer package, and one whose module needs another."""
    folder = tmp_path / "a_house"
    folder.mkdir()
    door = "from sgl_kvfetch.doors import open_door\n__getattr__, __dir__, __all__ = open_door(__name__, __file__)\n"
    exported = {"sound": "Sound", "too_old": "TooOld", "missing": "Missing"}
    folder.joinpath("__init__.py").write_text(door)
    stub = "".join(f"from .{module} import {name} as {name}\n" for module, name in exported.items())
    folder.joinpath("__init__.pyi").write_text(stub)
    folder.joinpath("sound.py").write_text("class Sound: ...\n")
    folder.joinpath("too_old.py").write_text("import os\nclass TooOld(os.NewerError): ...\n")
    folder.joinpath("missing.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("a_house")


def test_a_name_is_imported_at_its_first_use(house: ModuleType) -> None:
    assert "sound" not in vars(house)
    assert house.Sound.__module__ == "a_house.sound"
    assert dir(house) == house.__all__ == ["Missing", "Sound", "TooOld"]
    with pytest.raises(AttributeError, match="module 'a_house' has no attribute 'Nothing'"):
        _ = house.Nothing


def test_what_keeps_a_module_from_being_imported_is_in_the_message(house: ModuleType) -> None:
    """Python makes "cannot import name 'TooOld' from 'a_house'" of an AttributeError, without its cause."""
    cause = "module 'os' has no attribute 'NewerError'"
    with pytest.raises(ImportError, match=rf"^a_house\.TooOld cannot be imported: {cause}$"):
        from a_house import TooOld  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ImportError, match=cause):
        _ = house.TooOld
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        _ = house.Missing
