"""Tiny models are trained on one thread each: more would only wait for each other."""

import gc

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def libraries_that_no_collection_looks_at():
    """A training ends with a collection of garbage, which takes longer than a training with all imports to look at:
    the imports of the trainers, and of the files of tests before this file."""
    from trl_ext import GRPOTrainer, PPOTrainer, RewardTrainer  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def rows_of_running_forwards_are_those_of_trls_arguments(monkeypatch):
    """In every training of these tests: a forward scores its layout, and TRL's padded ids are of the same rows."""
    from trl_ext import GRPOTrainer  # which takes seconds, in the first test
    from trl_ext.trainers.step.forward import running_forward
    from trl_ext.trainers.step.unpadded import unpad

    scored = GRPOTrainer._get_per_token_logps_and_entropies

    def compared(trainer, model, input_ids, attention_mask, logits_to_keep, *args, **options):
        forward = running_forward()
        if forward is not None and trainer.step_settings.packs:
            given, known = unpad(input_ids, attention_mask, logits_to_keep), forward.unpadded
            assert given.width == known.width and np.array_equal(given.num_scored, known.num_scored)
            if forward.num_rows:  # one that counts for nothing holds any tokens
                assert np.array_equal(given.sequences.starts, known.sequences.starts)
                is_text = known.sequences.tokens >= 0  # numbers below zero name images
                assert np.array_equal(given.sequences.tokens[is_text], known.sequences.tokens[is_text])
        return scored(trainer, model, input_ids, attention_mask, logits_to_keep, *args, **options)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", compared)


@pytest.fixture(autouse=True)
def commands_that_silence_transformers_silence_their_test_alone():
    from transformers.utils import logging

    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)
