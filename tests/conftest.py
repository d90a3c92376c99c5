"""What every test needs: one thread, no downloads, seeds that do not depend on order."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch and transformers are imported: they read these once. Worker processes inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No test may read captures that the user stored.
_CAPTURES = tempfile.TemporaryDirectory(prefix="mmcompile-captures-")
os.environ["MMCOMPILE_CACHE"] = _CAPTURES.name

import pytest  # noqa: E402  (the variables come first)
import torch  # noqa: E402

if not torch.cuda.is_available():
    # Kernels are interpreted then. Triton reads this when it is imported, which torch.export does, so no later place would do.
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """The same random numbers for a test alone and in a full run; the default dtype cannot leak into the next one."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="accept what goldens print now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("name.txt", text)` compares text with `golden/name.txt` beside the test."""
    folder = request.path.parent / "golden"
    update = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        path: Path = folder / name
        if update:
            folder.mkdir(exist_ok=True)
            path.write_text(text + "\n")
        assert path.exists(), f"no golden {path}; run once with --update-golden and read what it wrote"
        assert text + "\n" == path.read_text(), f"differs from {path}; if it should, run with --update-golden"

    return check


def pytest_collection_finish() -> None:
    """Take what is loaded out of garbage collection, and collect less often, which took 9 % of the time of tests that capture."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu where there is none, also when they are asked for by `-m gpu`."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
