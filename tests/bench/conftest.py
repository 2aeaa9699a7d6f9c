import json
from pathlib import Path

import pytest
from dummy_config import CONFIG


@pytest.fixture(scope="session")
def dummy_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a config and nothing else, for dummy weights."""
    folder: Path = tmp_path_factory.mktemp("dummy") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)
