"""Images: decoded on demand, and made the floats that networks expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.images.decode import Decoding as Decoding
    from lockstep.images.normalisation import normalize as normalize
    from lockstep.images.normalisation import standardize as standardize
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, see="augmentations are in ls.augmentations")
