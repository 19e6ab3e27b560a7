"""Every error anyprec raises for a user's mistake; all are `ValueError`s with a one-line message.

The message says what was given, what is allowed and what to do. The command line prints it after `anyprec: error:`.

    AnyprecError
    |- UnsupportedBits, UncalibratedBits, UnknownLayer, ProfileError     widths, layers and profiles of a model
    |- NothingConverted, UnsupportedOperation, VerificationFailed        convert and pack
    |- RecipeError, CheckpointError, Diverged                            train
    |- DataError                                                         data sets
    |  `- DownloadMismatch
    |- OutputError, MissingExtra, UnsupportedIsa                         the machine: disk, packages, CPU
    |- ModelFileError                                                    a model file (.apm)
    |  |- NotAModelFile, UnsupportedVersion, TruncatedFile
    |  |- BadHeader, BadTensor, BadGraph, ChecksumMismatch
    |  `- UnknownModel, CascadeError
    |- InputError, ModelClosed, Cancelled                                load and run
    |- ArrivalsError, LoadTestError                                      loadtest and simulate
    `- ServeError                                                        serve
       `- Overloaded, Expired, Draining                                  refused requests
"""

from __future__ import annotations


class AnyprecError(ValueError):
    """Base of all errors of anyprec; catch this one to catch them all."""


class UnsupportedBits(AnyprecError):
    """A number of bits that no model has (0, 9, -1), or that this model does not have."""


class UncalibratedBits(AnyprecError):
    """A width or profile that the model can run only after its norms (and ranges) are calibrated."""


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


class DownloadMismatch(DataError):
    """A downloaded or stored file whose checksum is not the published one."""


class CheckpointError(AnyprecError):
    """A checkpoint that is missing, truncated or made for another model."""


class Diverged(AnyprecError):
    """Training met NaN or infinity (the last good checkpoint is kept), or left numbers that no file can hold."""


class OutputError(AnyprecError):
    """A file or folder that cannot be written: no room, no permission, read-only, in use by another process."""


class MissingExtra(AnyprecError):
    """A feature whose optional dependencies are not installed."""


class UnsupportedIsa(AnyprecError):
    """An `ANYPREC_ISA` that is unknown, not built in, or more than this CPU can run."""


class ModelFileError(AnyprecError):
    """A model file (.apm) that cannot be opened, read or written; those below say what is wrong with it."""


class CascadeError(ModelFileError):
    """A cascade that the file does not have, that does not fit it, or a threshold that is none."""


class NotAModelFile(ModelFileError):
    """A safetensors file without the graph that a model file needs."""


class UnsupportedVersion(ModelFileError):
    """A model file of a format version that this anyprec does not read."""


class TruncatedFile(ModelFileError):
    """A model file that ends before its narrowest profile is complete, or before the bytes asked for."""


class BadHeader(ModelFileError):
    """A model file whose header is too long, not UTF-8, not JSON, or not that of a safetensors file."""


class BadTensor(ModelFileError):
    """A tensor that is missing, unknown, of the wrong dtype or shape, or in the wrong place."""


class BadGraph(ModelFileError):
    """A graph whose ops, weights or profiles do not make sense or do not fit each other."""


class ChecksumMismatch(ModelFileError):
    """A graph or tensor whose bytes are not those that were written."""


class UnknownModel(ModelFileError):
    """A name that is neither a file nor one of the models of `anyprec models`, or one that is not downloaded yet."""


class UnsupportedOperation(AnyprecError):
    """A part of a network that the model file has no operation for."""


class VerificationFailed(AnyprecError):
    """A packed network that does not compute the same as the module it was made from."""


class InputError(AnyprecError):
    """Images (or their layout, type or size) that a packed model cannot take."""


class ModelClosed(AnyprecError):
    """A packed model that is used after its `close()`, or after its `with` block."""


class Cancelled(AnyprecError):
    """A run that ended before it was done: its CancelToken was cancelled, or its time was up."""


class ArrivalsError(AnyprecError):
    """Invalid arrival specification: negative rate, unreadable trace, unknown form."""


class LoadTestError(AnyprecError):
    """A server that cannot be loaded: it does not answer, lacks the model, or takes other inputs."""


class ServeError(AnyprecError):
    """Invalid settings of the scheduler, the policy or the simulator; its subclasses are refused requests."""


class Overloaded(ServeError):
    """A request that cannot be answered in time at any width it allows; try again after `retry_after` seconds.

    over_share: its client holds more of the queue than its share while others wait.
    """

    def __init__(self, message: str, retry_after: float = 1.0, over_share: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.over_share = over_share


class Expired(ServeError):
    """A request whose deadline passed while it waited."""


class Draining(ServeError):
    """A request that came after the server had been told to stop."""
