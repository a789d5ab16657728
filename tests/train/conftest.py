"""Tiny models are trained on one thread each: more would only wait for each other."""

import torch

torch.set_num_threads(1)
