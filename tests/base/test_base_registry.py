"""Entry points of other packages, broken ones among them."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.base.errors import UnsupportedError
from headrace.base.registry import Registry

GROUP = "headrace.test_things"
REGISTRY: Registry[str] = Registry("thing", group=GROUP)
GOOD = """
from test_base_registry import REGISTRY
REGISTRY.register("good")("entry")
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution with a plug-in that fails on import and one that works."""
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('wrong version')\n")
    (tmp_path / "good_plugin.py").write_text(GOOD)
    record = tmp_path / "someones_package-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: someones-package\nVersion: 1.0\n"
    )
    points = "bad = broken_plugin\nmissing = no_such_module\ngood = good_plugin\n"
    (record / "entry_points.txt").write_text(f"[{GROUP}]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "test_base_registry", sys.modules[__name__])
    yield
    sys.modules.pop("good_plugin", None)


@pytest.mark.usefixtures("plugins")
def test_a_broken_plugin_is_told_and_stops_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert list(REGISTRY) == ["good"]
    assert REGISTRY.entries("good") == ("entry",)
    assert "bad" not in REGISTRY
    first, second = (record.getMessage() for record in caplog.records)
    for part in ("thing 'bad'", "bad = broken_plugin", "someones-package", "wrong version"):
        assert part in first
    assert "no_such_module" in second
    with pytest.raises(UnsupportedError) as caught:
        REGISTRY.entries("bad")
    for part in ("'bad' cannot be loaded", "RuntimeError: wrong version", "Known: good"):
        assert part in str(caught.value)
    with pytest.raises(UnsupportedError, match=r"Unknown thing 'worse'. Known: good"):
        REGISTRY.entries("worse")
