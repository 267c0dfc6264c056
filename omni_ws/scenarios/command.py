"""The command ``omni-ws test``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from omni_ws.scenarios.form import FormError, ScenarioFile, read_file

PASSED: Final = 0
FAILED: Final = 1
#: The exit status for wrong usage, also for a file that does not have the form.
USAGE_ERROR: Final = 2


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command; return 0 if all scenarios passed, 1 if one failed, 2 for a bad file or command line."""
    options = _parser().parse_args(arguments)
    try:
        files = read_files(options.files)
    except FormError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return USAGE_ERROR
    if options.check:
        print(f"{sum(len(file.scenarios) for file in files)} scenarios in {len(files)} files are well-formed")
        return PASSED
    raise NotImplementedError


def read_files(paths: Sequence[Path]) -> list[ScenarioFile]:
    """Read all files. Raises FormError with the problems of all of them."""
    files: list[ScenarioFile] = []
    problems: list[str] = []
    for path in paths:
        try:
            files.append(read_file(path))
        except FormError as error:
            problems += error.problems
    if problems:
        raise FormError(problems)
    return files


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-ws test",
        description="Let callers talk to a server as files of scenarios tell, and check what they hear. "
        "The exit status is 0 if all passed, 1 if not, 2 if a file or an option is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.yaml", help="scenarios (docs/testing.md)")
    parser.add_argument("--check", action="store_true", help="only check the form of the files")
    return parser
