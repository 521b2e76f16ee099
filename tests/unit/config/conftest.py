"""The published config, whole or with one place changed."""

from pathlib import Path

import pytest

from glmv.config import ConfigError, load_config


@pytest.fixture
def published():
    return Path(__file__).parents[3] / "examples" / "glm4.5v" / "glm4_5v_106B_config_v1.yaml"


@pytest.fixture
def changed(tmp_path, published):
    """`changed(old, new)`: the published config with one text replaced, as a file named x.yaml."""

    def write(old="", new=""):
        text = published.read_text()
        assert text.count(old) == 1 or not old, f"{old!r} stands {text.count(old)} times in the published config"
        path = tmp_path / "x.yaml"
        path.write_text(text.replace(old, new) if old else text)
        return path

    return write


@pytest.fixture
def refusal(changed):
    """`refusal(old, new, *overrides)`: what load_config says, with the directory of the file cut off."""

    def load(old="", new="", *overrides):
        path = changed(old, new)
        with pytest.raises(ConfigError) as caught:
            load_config(path, overrides)
        assert caught.value.exit_code == 2
        return str(caught.value).replace(str(path), "x.yaml")

    return load
