"""Small pictures of hard samples, which a call keeps where samples are pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping

import numpy as np

from asynckfold.errors import AsyncKFoldError
from asynckfold.store import RunReader
from asynckfold.store.arrays import unpacking
from asynckfold.system.files import read_plain

PICTURES = "oof/pictures.npz"

_MOST = 64
"""Pictures, and pixels of an edge: more than a call writes."""


def pictures_of(store: RunReader) -> Mapping[int, str]:
    """Return PNG images as addresses by number of sample; nothing if the file is not sound."""
    try:
        data = read_plain(store.root / PICTURES, store.root)
        with unpacking(data) as (arrays, shapes):
            if max(shapes["pictures"]) > _MOST:
                return {}
            samples, pictures = arrays["samples"], arrays["pictures"]
    except (AsyncKFoldError, OSError, ValueError):
        return {}
    fits = pictures.ndim == 4 and pictures.shape[-1] in (1, 3)
    if not fits or pictures.dtype != np.uint8 or samples.shape != pictures.shape[:1]:
        return {}
    return {int(index): _address(picture) for index, picture in zip(samples, pictures, strict=True)}


def _address(picture: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    pixels = picture.squeeze(-1) if picture.shape[-1] == 1 else picture
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
