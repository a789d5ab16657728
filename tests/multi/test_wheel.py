"""The wheel carries the files that are not Python, and finds them again."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]


def test_every_data_file_is_in_the_wheel(wheel):
    outside = [*ROOT.glob("accelerate_configs/*.yaml"), *ROOT.glob("deepspeed_configs/*.json")]
    expected = {f"trl_ext/{path.relative_to(ROOT)}" for path in outside}
    kinds = ("yaml", "jinja", "css")
    inside = [path for kind in kinds for path in ROOT.glob(f"trl_ext/**/*.{kind}")]
    assert {path.suffix for path in inside} == {f".{kind}" for kind in kinds}
    expected |= {str(path.relative_to(ROOT)) for path in inside}
    expected |= {"trl_ext/py.typed", "trl_ext/resources.py"}
    assert not expected - set(ZipFile(wheel).namelist())


def test_nothing_but_the_package_is_in_the_wheel(wheel):
    folders = {name.split("/")[0].split("-")[0] for name in ZipFile(wheel).namelist()}
    assert folders == {"trl_ext"}  # and trl_ext-<version>.dist-info


def test_an_installed_wheel_finds_its_files(wheel, tmp_path):
    ZipFile(wheel).extractall(tmp_path)
    code = "from trl_ext import resources as r; print(r.accelerate_config('zero2'), r.deepspeed_config('zero3'))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    inside = tmp_path / "trl_ext"
    assert done.stdout.split() == [
        str(inside / "accelerate_configs" / "zero2.yaml"),
        str(inside / "deepspeed_configs" / "zero3.json"),
    ], done.stderr
