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
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VECTORS = ROOT / "protocol" / "vectors"
#: Of each target, the inputs that earlier runs found: as few as reach all that they reached.
KEPT = ROOT / "fuzzing" / "corpus"
#: Corpus and crashes of earlier runs on this machine.
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
    for seed in (*seeds(), *kept(name)):
        (corpus / hashlib.sha256(seed).hexdigest()[:20]).write_bytes(seed)
    logging.disable()  # log lines about invalid input would bury the findings
    options = [f"-artifact_prefix={crashes}/{name}-", "-max_len=4096", "-timeout=10", "-rss_limit_mb=2048"]
    # Like libFuzzer, tries named inputs only; without any, explores the corpus.
    named = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    atheris = _atheris()
    # libFuzzer gives the first to a shell where it starts itself again, as it does to merge.
    command = f"{sys.executable} {sys.argv[0]}"
    atheris.Setup([command, *options, *sys.argv[1:], *([] if named else [str(corpus)])], check)
    atheris.Fuzz()


def kept(name: str) -> Iterator[bytes]:
    """Inputs of a target that are part of the repository; empty if none are."""
    path = KEPT / f"{name}.zip"
    if path.exists():
        with zipfile.ZipFile(path) as archive:
            for entry in archive.namelist():
                yield archive.read(entry)


def keep(name: str, inputs: Iterator[bytes]) -> int:
    """Writes them, in an order and with times that depend on nothing else; returns how many."""
    named = {hashlib.sha256(one).hexdigest()[:20]: one for one in inputs}
    KEPT.mkdir(exist_ok=True)
    with zipfile.ZipFile(KEPT / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in sorted(named):
            archive.writestr(zipfile.ZipInfo(entry), named[entry], zipfile.ZIP_DEFLATED)
    return len(named)


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
