"""Divide a transform pipeline into what runs once per sample and what runs per batch.

::

    user's steps    Resize   RandomCrop   RandomHorizontalFlip   ToTensor   Normalize
                    ------   ------------------------------------------------------
    View            prefix   steps, each for a whole batch (B, C, H, W)
                    applied once, result stored as uint8

A random step draws from (seed, epoch, sample number, position of the step) only, so augmentation
does not depend on how samples are batched. From the first random step on, steps without a batched
form run sample by sample (`PerSample`), with the global generators seeded the same way.
"""

from asynckfold.data.transforms.batch_steps import (
    BatchStep,
    Normalize,
    PerSample,
    RandomCrop,
    RandomFlip,
    ToFloat,
    Unchanged,
)
from asynckfold.data.transforms.draws import AnyDraw, Draw, JoinedDraw, splitmix64
from asynckfold.data.transforms.equivalents import batch_step
from asynckfold.data.transforms.generators import generators_kept, seed_generators, seeded, varies
from asynckfold.data.transforms.pipeline import PipelineTrace, View, divide, trace
from asynckfold.data.transforms.samples import (
    Kind,
    Misfit,
    Records,
    copied,
    kind_of,
    native,
    records_in,
    same_sample,
    to_array,
    unstorable,
)
from asynckfold.data.transforms.steps import (
    Step,
    apply,
    describe,
    flatten,
    is_known,
    is_random,
    same_steps,
    step_name,
)
from asynckfold.data.transforms.trees import (
    Array,
    TreeArrays,
    is_tree,
    kinds_text,
    leaves_by_path,
    mapped,
    on_device,
    tensors_in,
)
from asynckfold.data.transforms.watching import Watch, held_generators

__all__ = [
    "AnyDraw",
    "Array",
    "BatchStep",
    "Draw",
    "JoinedDraw",
    "Kind",
    "Misfit",
    "Normalize",
    "PerSample",
    "RandomCrop",
    "RandomFlip",
    "Records",
    "Step",
    "ToFloat",
    "PipelineTrace",
    "TreeArrays",
    "Unchanged",
    "View",
    "Watch",
    "apply",
    "batch_step",
    "copied",
    "describe",
    "divide",
    "flatten",
    "generators_kept",
    "held_generators",
    "is_known",
    "is_random",
    "is_tree",
    "kind_of",
    "leaves_by_path",
    "mapped",
    "native",
    "on_device",
    "records_in",
    "kinds_text",
    "same_sample",
    "same_steps",
    "seed_generators",
    "seeded",
    "splitmix64",
    "step_name",
    "tensors_in",
    "to_array",
    "trace",
    "unstorable",
    "varies",
]
