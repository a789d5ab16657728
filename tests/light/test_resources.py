"""Shipped files are found by name wherever the package was installed to."""

import pytest

from trl_ext import resources
from trl_ext.errors import ConfigError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An empty package folder that `resources` takes for its own."""
    folder = tmp_path / "site-packages" / "trl_ext"
    folder.mkdir(parents=True)
    monkeypatch.setattr(resources, "PACKAGE", folder)
    return folder


def ship(path):
    path.parent.mkdir(exist_ok=True)
    path.touch()
    return path


def test_a_checkout_finds_its_folders_beside_the_package():
    root = resources.PACKAGE.parent
    assert resources.accelerate_config("zero2") == root / "accelerate_configs" / "zero2.yaml"
    assert resources.deepspeed_config("zero3_offload") == root / "deepspeed_configs" / "zero3_offload.json"


def test_a_wheel_finds_its_folders_inside_the_package_before_those_beside_it(package):
    inside = ship(package / "accelerate_configs" / "zero2.yaml")
    assert resources.accelerate_config("zero2") == inside
    ship(package.parent / "deepspeed_configs" / "zero2.json")
    inside = ship(package / "deepspeed_configs" / "zero2.json")
    assert resources.deepspeed_config("zero2") == inside
    inside = ship(package / "recipes" / "quickstart.yaml")
    assert resources.recipe("quickstart") == inside


def test_an_unknown_name_is_answered_with_the_names_and_the_nearest_if_one_is_near():
    with pytest.raises(ConfigError, match=r"'zero2_ofload' is not in .*cpu, .*zero1, .*nearest is 'zero2_offload'"):
        resources.accelerate_config("zero2_ofload")
    with pytest.raises(ConfigError, match="zero1, zero2"):
        resources.deepspeed_config("?")


def test_an_installation_without_the_folder_says_so(package):
    with pytest.raises(ConfigError, match="Install trl-ext again"):
        resources.recipe("quickstart")
