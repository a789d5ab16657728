"""Memory options are rows: the planner, a plan's files and a run read them, and few files name one."""

import re
from dataclasses import fields

import pytest

from tests.conftest import ROOT
from trl_ext.memory.files.settings import recipe
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.options import OPTIONS
from trl_ext.memory.planner.choices import FREE
from trl_ext.memory.planner.keys import job_of_run
from trl_ext.memory.planner.planner import plan
from trl_ext.memory.planner.search import label

KEYS = {"optim": "adamw_torch_fused", "max_length": 1024}
# A new option has its field in `Job`, its row, and the code that it switches on. These numbers may only fall.
MOST_FILES = {"keep_attention": 4, "activation_offloading": 8}
each_option = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)


@each_option
def test_an_option_is_a_setting_of_a_job_that_is_off_and_that_the_planner_may_choose(option):
    [setting] = [one for one in fields(Job) if one.name == option.name]
    assert setting.default is False and setting.metadata["purpose"]
    assert option.name in FREE


@each_option
def test_a_plan_names_an_option_and_a_run_reads_it_from_the_recipe(option):
    job = Job("reward", **{option.name: True})
    assert option.label in label(job, 1)
    read = job_of_run("reward", KEYS | recipe(job, "", 1), find_shape("8B"), 1)
    assert getattr(read, option.name)


@each_option
def test_the_planner_chooses_only_checkpointing_with_which_a_given_option_works(option):
    job = plan("reward", "8B", "8xA100-80GB", **{option.name: True}).best.job
    assert getattr(job, option.name) and job.checkpoint_every


@each_option
def test_few_files_name_an_option(option):
    word = re.compile(rf"\b{option.name}\b")
    found = [str(path) for path in (ROOT / "trl_ext").rglob("*.py") if word.search(path.read_text())]
    assert len(found) <= MOST_FILES[option.name], found
