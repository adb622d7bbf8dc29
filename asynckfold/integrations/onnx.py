"""A module as an ONNX model, by torch's exporter."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from asynckfold.errors import InputError


def onnx_of(model: nn.Module, inputs: torch.Tensor) -> bytes:
    """Return a module as an ONNX model of batches of any size.

    Parameters
    ----------
    model : Module
        In evaluation mode.
    inputs : Tensor
        A batch of at least two samples.

    Raises
    ------
    InputError
        A package is missing, or torch cannot export the module.
    """
    batch = torch.export.Dim("batch", min=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model,
                (inputs,),
                dynamo=True,
                dynamic_shapes=({0: batch},),
                input_names=["inputs"],
                output_names=["outputs"],
                verbose=False,
            )
    except Exception as error:
        rule = "the model must be one that torch.onnx can export"
        received = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        remedy = "Change what it names in the model, or: pip install 'asynckfold[onnx]'."
        raise InputError.one(rule, received, remedy) from error
    assert program is not None
    return bytes(program.model_proto.SerializeToString())
