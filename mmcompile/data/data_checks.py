"""Checks of datasets and samples, with the errors for those that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from torch.utils.data import DataLoader

from mmcompile.data.collate import Sample
from mmcompile.errors import DataError

_READABLE = "a dataset that starts again each time it is iterated, or a function that returns a new iterator"

T = TypeVar("T")


def named(dataset: object) -> str:
    """Return the words that name a dataset in messages: `the`, and its class name."""
    return f"the {type(dataset).__name__}"


def asked(what: str, function: Callable[[], T]) -> T:
    """Call the user's function and return its result. Raises DataError for any of its exceptions but StopIteration.

    Args:
        what: beginning of the error message.
        function: code of the user's dataset.
    """
    try:
        return function()
    except StopIteration:
        raise
    except Exception as error:  # it raises whatever it likes
        raise DataError(f"{what} failed: {type(error).__name__}: {error}") from error


def check_sample(sample: object, where: str) -> Sample:
    """Return a sample as a mapping of inputs by name. Raises DataError, with `where` it is from, if it is no mapping."""
    if not isinstance(sample, Mapping):
        raise DataError(
            f"{where} is a {type(sample).__name__}; wanted a mapping from input names to tensors, as a processor returns it"
        )
    return sample


def check_batch_size(batch_size: int) -> None:
    """Raise DataError if a step has no samples (`batch_size` below 1)."""
    if batch_size < 1:
        raise DataError(f"a step of {batch_size} samples; wanted at least 1")


def check_size(dataset: object, num_samples: int, batch_size: int, epoch: int) -> None:
    """Raise DataError if epoch `epoch` has fewer samples (`num_samples`) than a step (`batch_size`)."""
    if num_samples >= batch_size:
        return
    advice = "give a larger dataset or a smaller batch"
    if epoch and not num_samples:
        advice = f"wanted {_READABLE}"
    raise DataError(f"{named(dataset)} has {num_samples} samples in epoch {epoch}, a step needs {batch_size}; {advice}")


def check_stream(dataset: object) -> None:
    """Raise DataError for a dataset that can be iterated only once."""
    if isinstance(dataset, Mapping):
        raise DataError(f"got a mapping with {', '.join(map(repr, dataset))}; wanted one of its datasets")
    if isinstance(dataset, DataLoader):
        raise DataError("got a DataLoader, which makes batches of its own; pass the dataset it reads")
    if isinstance(dataset, Iterator):
        raise DataError(
            f"{named(dataset)} can be read only once, and data is read again in each epoch and after a failure; "
            f"pass {_READABLE}"
        )
    if not isinstance(dataset, Iterable) and not callable(dataset):
        raise DataError(
            f"{named(dataset)} holds no samples: wanted a dataset with a length and indices, or {_READABLE}"
        )
