"""The weights that models had at first, in the folder of the run.

A model that is given as an instance has other weights in each process, unless it is seeded. Who has
to continue such a run, or to repeat it, finds those that it was begun with.
"""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

from asynckfold.jobs.recipe import InitialState, Recipe
from asynckfold.store.layout import initial_weights
from asynckfold.system.files import make_folders, write_whole


def keep_initial_weights(root: Path, recipe: Recipe) -> None:
    """Write the weights of each model that was given as an instance, unless they are there.

    Raises
    ------
    StorageError
        The disk refused.
    """
    for name, model in recipe.models.items():
        path = initial_weights(root, name)
        if not isinstance(model, InitialState) or path.is_file():
            continue
        # Copies: safetensors refuses tensors that share memory, such as tied weights.
        tensors = {
            key: value.detach().cpu().clone(memory_format=torch.contiguous_format)
            for key, value in model.module.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        make_folders(root, path.parent)
        write_whole(path, safetensors.torch.save(tensors), root)
