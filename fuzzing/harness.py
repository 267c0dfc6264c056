"""What all targets share: instrumented imports, the corpus, and the call of the fuzzer.

A target is a module with ``check(data)``, which raises only when something is wrong, and ``seeds()``. It can be
imported without atheris, as the tests do: then nothing is instrumented.
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
#: What was found in earlier runs, and what made a target fail.
STATE = ROOT / ".cache" / "fuzzing"

# A target is run as a script from anywhere; the model of the input stream stands among the tests.
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def instrumented() -> AbstractContextManager[Any]:
    """Around a target's imports: what is imported inside is traced when a fuzzer runs."""
    if not running():
        return nullcontext()
    context: AbstractContextManager[Any] = _atheris().instrument_imports(include=["omni_ws"])
    return context


def running() -> bool:
    """Whether the program is a target that was started as a script."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    return main is not None and Path(main).name.startswith("fuzz_")


def fuzz(check: Callable[[bytes], None], seeds: Callable[[], Iterator[bytes]]) -> None:
    """Runs until an option of the command line says so, or until something is found."""
    name = Path(sys.argv[0]).stem
    corpus, crashes = STATE / name, STATE / "crashes"
    for folder in (corpus, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds():
        (corpus / hashlib.sha256(seed).hexdigest()[:20]).write_bytes(seed)
    logging.disable()  # what libraries say of each wrong input would bury what was found
    options = [f"-artifact_prefix={crashes}/{name}-", "-max_len=4096", "-timeout=10", "-rss_limit_mb=2048"]
    # Inputs that are named are tried alone, as libFuzzer does it; only without them the corpus is explored.
    named = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    atheris = _atheris()
    atheris.Setup([sys.argv[0], *options, *sys.argv[1:], *([] if named else [str(corpus)])], check)
    atheris.Fuzz()


def vectors(file_name: str) -> Iterator[dict[str, Any]]:
    """The golden vectors of one file; nothing where the file is missing."""
    path = VECTORS / file_name
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            yield json.loads(line)


def _atheris() -> Any:
    try:
        return importlib.import_module("atheris")
    except ImportError:
        raise SystemExit("the fuzzer is missing; 'make fuzz' installs it") from None
