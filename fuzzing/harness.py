"""Shared by all targets: instrumented imports, the corpus, and the call of the fuzzer.

A target is a module with ``check(data)``, which raises only on a defect, and ``seeds()``. Tests import targets
without atheris; then nothing is instrumented.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VECTORS = ROOT / "protocol" / "vectors"
#: Corpus and crashes of earlier runs.
STATE = ROOT / ".cache" / "fuzzing"

# A target may run as a script from anywhere; the model of the input stream is part of the tests.
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def instrumented() -> AbstractContextManager[Any]:
    """Context manager around the imports of a target, which instruments them if a fuzzer runs."""
    if not running():
        return nullcontext()
    context: AbstractContextManager[Any] = _atheris().instrument_imports(include=["omni_ws"])
    return context


def running() -> bool:
    """Returns whether the program is a target that was started as a script."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    return main is not None and Path(main).name.startswith("fuzz_")


def fuzz(check: Callable[[bytes], None], seeds: Callable[[], Iterator[bytes]]) -> None:
    """Fuzzes until an option of the command line ends it, or a defect is found."""
    name = Path(sys.argv[0]).stem
    corpus, crashes = STATE / name, STATE / "crashes"
    for folder in (corpus, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds():
        (corpus / hashlib.sha256(seed).hexdigest()[:20]).write_bytes(seed)
    logging.disable()  # log lines about invalid input would bury the findings
    options = [f"-artifact_prefix={crashes}/{name}-", "-max_len=4096", "-timeout=10", "-rss_limit_mb=2048"]
    # Like libFuzzer, tries named inputs only; without any, explores the corpus.
    named = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    atheris = _atheris()
    atheris.Setup([sys.argv[0], *options, *sys.argv[1:], *([] if named else [str(corpus)])], check)
    atheris.Fuzz()


def vectors(file_name: str) -> Iterator[dict[str, Any]]:
    """Golden vectors of a file; empty if the file is missing."""
    path = VECTORS / file_name
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            yield json.loads(line)


def _atheris() -> Any:
    try:
        return importlib.import_module("atheris")
    except ImportError:
        raise SystemExit("the fuzzer is not installed; 'make fuzz' installs it") from None
