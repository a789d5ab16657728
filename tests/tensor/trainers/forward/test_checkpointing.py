"""Checkpointing of every n-th layer outlasts TRL, which switches checkpointing off and on around generation."""

import warnings

import pytest
import torch
from trl.models.utils import disable_gradient_checkpointing

from tests import tiny
from trl_ext.compat.transformers import old_names_unsaid
from trl_ext.errors import ConfigError
from trl_ext.trainers.forward.checkpointing import enable_checkpointing, is_checkpointing, keep_layer_options

torch.set_num_threads(1)
OPTIONS = {"every_n_layers": 2, "use_reentrant": False}


def checkpointed(model):
    return [layer.gradient_checkpointing for layer in model.model.layers]


def gradient(model):
    ids = torch.arange(3, 11)[None]
    model.train()(ids, labels=ids).loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.mark.parametrize("every", [1, 2, 3])
def test_it_lasts_over_generation_and_changes_no_gradient(every):
    plain, model = tiny.model("llama"), tiny.model("llama")
    options = {**OPTIONS, "every_n_layers": every}
    enable_checkpointing(model, options)
    keep_layer_options(model, options)
    with disable_gradient_checkpointing(model, options):
        assert checkpointed(model) == [False] * 3
    assert checkpointed(model) == [index % every == 0 for index in range(3)]
    assert torch.equal(gradient(model), gradient(plain))


def test_a_trainer_takes_its_options_as_before():
    """transformers' Trainer names the layers in an argument of their own."""
    model = tiny.model("llama")
    keep_layer_options(model, None)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=None, every_n_layers=2)
    assert checkpointed(model) == [True, False, True]
    assert OPTIONS == {"every_n_layers": 2, "use_reentrant": False}  # nobody's options are changed


def test_a_program_that_keeps_attention_and_recomputes_reentrantly_is_refused():
    model = tiny.model("llama")
    keep_layer_options(model, None)
    with pytest.raises(ConfigError, match=r"needs use_reentrant: false\. Set it so"):
        model.gradient_checkpointing_enable({"keep_attention": True, "use_reentrant": True})


@pytest.mark.filterwarnings("default")
def test_old_names_are_left_unsaid_where_we_call_them_and_said_of_a_users_own():
    model = tiny.model("llama")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        keep_layer_options(model, None)
        enable_checkpointing(model)
        with old_names_unsaid(), disable_gradient_checkpointing(model):
            assert not is_checkpointing(model)
            warnings.warn("a user's", FutureWarning, stacklevel=1)
        model.gradient_checkpointing_disable()
    said = [str(one.message) for one in seen]
    assert len(said) == 2 and said[0] == "a user's" and said[1].startswith("`gradient_checkpointing_disable` is")
