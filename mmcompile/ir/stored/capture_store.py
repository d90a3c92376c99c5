"""`CaptureStore`: a folder of captures that earlier runs made of the same model, so that a second start makes none.

A file is found by a digest of all that its capture depends on, and used only if a replay of the model's Python makes the same
calls as when the file was written. Files hold pickles: the folder must be the user's own, and files of others are ignored.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from mmcompile.errors import OutputError
from mmcompile.files import write_atomic
from mmcompile.ir.capture import Capture
from mmcompile.ir.inputs import FlatBatch
from mmcompile.ir.replay.hole_sites import HoleSites
from mmcompile.ir.replay.learning import Example, LearnedTemplate, Learner, ReplayedHoles, without_floats
from mmcompile.ir.replay.loops import LoopSites
from mmcompile.ir.replay.program import ResultShapes
from mmcompile.ir.replay.replayer import Replayer
from mmcompile.ir.stored.capture_bytes import StoreError, decoded, encoded
from mmcompile.ir.stored.model_digest import batch_digest, model_digest, text_digest
from mmcompile.ir.stored.script_digest import script_digest, template_digest

_HEADER = b"mmcompile capture 1\n"
_OTHERS = 0o022
"""File modes with which users other than the owner can write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedRecord:
    """A learned capture, with the examples from which its holes are learned again without a trace."""

    examples: tuple[FlatBatch, ...] = field(repr=False)
    """Batches, oldest first; floats are zeros unless the model's Python reads them."""
    place: int
    """Index of the example that the capture was asked for."""
    sites: HoleSites
    """Places where batches had been found to differ before."""
    kept: bool
    """True if it was made of that example even if others had fewer sizes of 0 and 1."""
    paths: frozenset[str]
    """Paths of all modules that any batch called."""
    opened: frozenset[str]
    """Paths of modules that are never one step."""
    loops: LoopSites
    """Places where batches were found to call another number of times."""
    capture: Capture | None = field(repr=False)
    """The capture without holes; None where it is not needed."""
    shapes: dict[str, ResultShapes]
    """Path of a module that is one step -> how its results' sizes follow from its arguments'."""
    digest: str
    """Digest of the template."""

    @classmethod
    def of(
        cls,
        learner: Learner,
        learned: LearnedTemplate,
        asked: Example,
        capture: Capture,
        sites: HoleSites,
        *,
        kept: bool,
    ) -> LearnedRecord:
        """Return the record of a capture that `learner` has just made, given what it was asked for (`Learner.learned`)."""
        examples = learner.examples
        return cls(
            examples=tuple(map(_stripped, examples)),
            place=next(place for place, example in enumerate(examples) if example.batch is asked.batch),
            sites=sites,
            kept=kept,
            paths=learner.paths,
            opened=learner.opened,
            loops=learner.loops,
            capture=replace(capture, holes=None),
            shapes=dict(learner.shapes),
            digest=template_digest(learned),
        )

    def restored(self, learner: Learner) -> tuple[Capture, FlatBatch]:
        """Return the capture with holes that `learner` fills, and the batch it was traced on. Raises StoreError as `learned`."""
        assert self.capture is not None, "a record without its capture"
        learned = self.learned(learner)
        holes = ReplayedHoles(learner=learner, learned=learned)
        return replace(self.capture, holes=holes), learned.example.batch

    def learned(self, learner: Learner) -> LearnedTemplate:
        """Return what `learner` learns from the examples.

        Raises:
            StoreError: the model's Python makes other calls on the examples than when the record was made.
        """
        learner.know(self.paths, self.opened, self.loops)
        for batch in self.examples:
            learner.see(batch)
        asked = next(example for example in learner.examples if example.batch is self.examples[self.place])
        learned = learner.learned(asked, self.sites, keep_example=self.kept)
        if template_digest(learned) != self.digest:
            raise StoreError("the model's Python makes other calls on the examples")
        learner.use(self.shapes)
        return learned


class CaptureStore:
    """Captures of one model in a folder.

    Args:
        folder: folder of the user's own; made when something is written.
        model: the model, with `requires_grad` as it will train.
    """

    def __init__(self, folder: str | os.PathLike[str], model: nn.Module) -> None:
        self._folder = Path(folder)
        self._model = model
        self._digest = model_digest(model)

    def captured(self, batch: FlatBatch, make: Callable[[], Capture], *conditions: object) -> Capture:
        """Return the capture of one batch: a stored one, or what `make` makes, which is then stored.

        Args:
            conditions: what the capture depends on beside model and batch.
        """
        name = self._name(batch_digest(batch), *conditions)
        digest: str | None = None
        try:
            digest = script_digest(Replayer(self._model).run(batch))
            stored = self._read(name)
            if stored is not None and stored[0] != digest:
                raise StoreError("the model's Python makes other calls on the batch")
            if stored is not None:
                return stored[1]
        except StoreError as error:
            _ignored(self._folder / name, error)
        except Exception as error:  # whatever the model's Python raises in a replay; the capture tells why
            _ignored(self._folder / name, error)
        found = make()
        if digest is not None:
            self._write(name, (digest, found))
        return found

    def learned(self, *key: object) -> tuple[LearnedRecord, ...]:
        """Return the stored records of learned captures of a family of batches, oldest first; `key` names the family."""
        name = self._name("learned", *key)
        try:
            return self._read(name) or ()
        except StoreError as error:
            _ignored(self._folder / name, error)
            return ()

    def keep(self, records: Sequence[LearnedRecord], *key: object) -> None:
        """Store the records of all learned captures of a family of batches."""
        self._write(self._name("learned", *key), tuple(records))

    def forget(self, error: Exception, *key: object) -> None:
        """Log that the records of a family do not hold for this model."""
        _ignored(self._folder / self._name("learned", *key), error)

    def _name(self, *parts: object) -> str:
        return f"{text_digest(self._digest, *map(str, parts))}.capture"

    def _read(self, name: str) -> Any:
        path = self._folder / name
        try:
            state = path.stat()
            data = path.read_bytes()
        except OSError:
            return None
        if state.st_uid != os.getuid() or state.st_mode & _OTHERS:
            raise StoreError("another user owns it or may write to it")
        header, digest, content = data[: len(_HEADER)], data[len(_HEADER) :][:64], data[len(_HEADER) + 64 :]
        if header != _HEADER or hashlib.sha256(content).hexdigest().encode() != digest:
            raise StoreError("it is damaged, or of another version")
        return decoded(content, self._model)

    def _write(self, name: str, value: object) -> None:
        path = self._folder / name
        try:
            content = encoded(value, self._model)
            decoded(content, self._model)
            digest = hashlib.sha256(content).hexdigest().encode()
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, _HEADER + digest + content)
            path.chmod(0o600)
        except (StoreError, OutputError, OSError) as error:
            logging.getLogger("mmcompile").warning("capture not stored in %s: %s", path, error)


def _stripped(example: Example) -> FlatBatch:
    """Return the batch of an example with zeros for its floats, unless the model's Python read them."""
    return example.batch if example.script.reads_floats else without_floats(example.batch)


def _ignored(path: Path, error: Exception) -> None:
    logging.getLogger("mmcompile").warning("stored capture %s is ignored: %s", path, error)
