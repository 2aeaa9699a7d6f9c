"""The cache folder where it cannot be."""

import errno

import pytest

from headrace.base import env
from headrace.base.errors import ConfigError


@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/headrace", "~no-such-user-x/c"])
def test_a_cache_that_can_be_no_folder(place, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    places = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "cache"}
    monkeypatch.setenv("HEADRACE_CACHE", str(places.get(place, place)))
    with pytest.raises(ConfigError, match=r"cannot be used.*Set HEADRACE_CACHE to a folder"):
        env.cache_dir()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EFBIG, errno.EEXIST])
def test_a_cache_that_cannot_be_written(number, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    told = pytest.raises(ConfigError, match=rf"{tmp_path} cannot be used.*Errno {number}")
    with told, env.using_cache():
        raise OSError(number, "pretended")


def test_a_cache_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "a" / "b"))
    assert env.cache_dir() == tmp_path / "a" / "b"
    assert env.cache_dir().is_dir()
