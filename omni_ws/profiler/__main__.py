"""Reports how the time of recorded requests was spent."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from omni_ws.installing import this_python, wrong_python

try:
    import msgspec

    from omni_ws.profiler.report import NoEvents, as_page, as_text, as_trace, build_report, chosen_timelines, read
except ModuleNotFoundError as missing:
    sys.exit(f"omni_ws.profiler: {wrong_python(missing, '-m omni_ws.profiler DIR')}")

FORMATS = ("table", "json", "html", "perfetto")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 if there are no events or no output can be written, or 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog=f"{this_python()} -m omni_ws.profiler", description=__doc__)
    parser.add_argument("paths", metavar="DIR", nargs="+", type=Path, help="folders with event files, or event files")
    parser.add_argument("--format", choices=FORMATS, default="table", help="form of the report (default: table)")
    parser.add_argument("--run", metavar="RUN_ID", help="id of a run (default: the newest)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write to a file instead of standard output")
    options = parser.parse_args(arguments)
    try:
        text = _rendered(options.paths, options.format, options.run)
        if options.out is None:
            sys.stdout.write(text)
        else:
            options.out.write_text(text, encoding="utf-8")
    except NoEvents as error:
        print(f"omni_ws.profiler: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"omni_ws.profiler: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _rendered(paths: Sequence[Path], form: str, run_id: str | None) -> str:
    recording = read(paths)
    match form:
        case "perfetto":
            return msgspec.json.encode(as_trace(chosen_timelines(recording, run_id).values())).decode() + "\n"
        case "html":
            return as_page(build_report(recording, run_id=run_id), chosen_timelines(recording, run_id))
        case "json":
            return (
                msgspec.json.format(msgspec.json.encode(build_report(recording, run_id=run_id)), indent=1).decode()
                + "\n"
            )
        case _:
            return as_text(build_report(recording, run_id=run_id))


if __name__ == "__main__":
    sys.exit(main())
