"""Every error a user can meet, in one tree.

A message has the fault, the value got, the value required, the place, and the next action.
"""

from __future__ import annotations


class MMCompileError(ValueError):
    """Base of every error caused by a user's input (the CLI prints it without a traceback)."""


class CaptureError(MMCompileError):
    """The model could not be captured as a graph in any mode."""


class BatchError(MMCompileError):
    """A sample or batch does not fit the model: a missing key, a wrong number of placeholders, no labels."""


class DataError(MMCompileError):
    """A dataset is too small, failed, or cannot be resumed from a cursor."""


class PlanError(MMCompileError):
    """No plan exists for the request, or a plan does not belong to this model."""


class StalePlanError(PlanError):
    """A plan file was made for another model, shape or library version."""


class ConfigError(MMCompileError):
    """An option is unknown, contradictory, or would have no effect."""


class MaskError(MMCompileError):
    """Mask words (one int64 a token) cannot express the requested attention mask, or were built wrongly."""


class CheckpointError(MMCompileError):
    """A checkpoint is missing, incomplete, or could not be written."""


class OutputError(MMCompileError):
    """A file could not be written (no such folder, no permission, disk full); an existing file of that name is unchanged."""


class EngineError(RuntimeError):
    """A rank failed while training; the message names rank, stage, step and action."""


class VerifyError(AssertionError):
    """A graph breaks a rule that passes rely on: a bug in mmcompile or a user's pass. The message shows the lines at fault."""
