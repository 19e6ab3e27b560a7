"""Every error anyprec raises for a user's mistake; all are `ValueError`s with a one-line message.

The message says what was given, what is allowed and what to do. The command line prints it after `anyprec: error:`.
"""

from __future__ import annotations


class AnyprecError(ValueError):
    """Base of all errors below; catch this one to catch them all."""


class UnsupportedBits(AnyprecError):
    """A bit-width that is no width at all (0, 9, -1), or not one of this model's."""


class UncalibratedBits(AnyprecError):
    """A width or profile the model could run, were its norms (and ranges) calibrated first."""


class UnknownLayer(AnyprecError):
    """A layer name that the model does not have."""


class ProfileError(AnyprecError):
    """A profile (mixed bits) that cannot be read or does not fit the model."""


class NothingConverted(AnyprecError):
    """`convert` found no layer it could make any-precision."""


class RecipeError(AnyprecError):
    """A recipe with an unknown field, a wrong type or a value out of range."""


class DataError(AnyprecError):
    """A data set that is missing, empty, truncated or of the wrong layout."""


class ChecksumError(DataError):
    """A downloaded or stored file whose checksum is not the published one."""


class CheckpointError(AnyprecError):
    """A checkpoint that is missing, truncated or made for another model."""


class Diverged(AnyprecError):
    """Training met NaN or infinity; the last good checkpoint is kept."""


class MissingExtra(AnyprecError):
    """A feature whose optional dependencies are not installed."""


class UnsupportedIsa(AnyprecError):
    """An `ANYPREC_ISA` that is unknown, not built in, or more than this CPU can run."""
