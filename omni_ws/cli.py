"""The command ``omni-ws`` and its subcommands."""

from __future__ import annotations

import argparse
import atexit
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final, NoReturn

from omni_ws import __version__
from omni_ws.config import ConfigurationError, ServerConfig, check_available, check_exposure, load
from omni_ws.config.keys import configured_keys
from omni_ws.config.loading import add_flags
from omni_ws.errors import OmniError

USAGE_ERROR: Final = 2
FAILURE: Final = 1
#: The status that shells report for a program that SIGINT ended.
INTERRUPTED: Final = 130

#: For each command: its module, imported when the command is used, with the function if that is not ``main``, and its
#: line in the help.
_COMMANDS: Final[Mapping[str, tuple[str | None, str]]] = {
    "serve": (None, "run the server (serve --help, serve --help-all); without a command: serve --fetch --browser"),
    "readout-vectors": (
        "omni_ws.tools.vllm:make_readout_vectors",
        "compute readout vectors from example prompts",
    ),
    "talk": ("omni_ws.talk.command", "talk with a server: microphone and loudspeaker, files, or text"),
    "mcp": ("omni_ws.mcp_server.command", "give programs a voice: an MCP server that speaks, listens and converses"),
    "replay": ("omni_ws.replay", "replay recorded sessions and compare the answers"),
    "test": ("omni_ws.scenarios.command", "let simulated callers talk to a server, and check what they hear"),
    "bench": ("omni_ws.bench", "load a running server and print how soon it answers"),
    "vllm-node": ("omni_ws.tools.vllm:run_vllm_node", "run a part of a server's vLLM model on another machine"),
    "weights": ("omni_ws.tools.weights", "list, fetch and check weights of models"),
}

#: What a call without a command does, and the flags that belong to no command.
_BY_DEFAULT: Final = ("serve", "--fetch", "--browser")
_OWN_FLAGS: Final = ("-h", "--help", "--version")


def run() -> NoReturn:
    """Entry point of the program.

    If torch is loaded, exits without destroying all objects of its libraries, which takes seconds.
    """
    status = main()
    if "torch" in sys.modules:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for a failure, 2 for wrong usage, 130 after ^C.

    ``talk`` has further statuses. Raises SystemExit for ``--help`` and ``--version``, and for an unknown command.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in _OWN_FLAGS):
        arguments = [*_BY_DEFAULT, *arguments]
    _parser().parse_args(arguments[:1])
    place, _ = _COMMANDS[arguments[0]]
    # Each command parses the other arguments itself; settings have flags beyond argparse (--vllm.args.<name>).
    if place is None:
        command = _serve_command
    else:
        module, _, function = place.partition(":")
        command = getattr(import_module(module), function or "main")
    status: int = command(arguments[1:], os.environ if environ is None else environ)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="omni-ws", description="A real-time speech server.")
    parser.add_argument("--version", action="version", version=f"omni-ws {__version__}")
    commands = parser.add_subparsers(metavar="command")
    for name, (_, words) in _COMMANDS.items():
        commands.add_parser(name, help=words, add_help=False)
    return parser


def _serve_options() -> argparse.ArgumentParser:
    """The flags of ``serve`` that are not settings."""
    parser = argparse.ArgumentParser(prog="omni-ws serve", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true", help="show the most used flags and exit")
    parser.add_argument("--help-all", action="store_true", help="show all flags and exit")
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="read settings from this file")
    parser.add_argument("--print-config", action="store_true", help="print all values with their origins and exit")
    parser.add_argument(
        "--fetch",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="first fetch weights that the parts can use, and with --llm auto a language model in the background",
    )
    parser.add_argument(
        "--browser",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="in a terminal of a desktop, open the page in the browser once the server can answer",
    )
    parser.add_argument(
        "--lan",
        action="store_true",
        help="listen on the local network, with a certificate and a key made on this machine, and print what to open",
    )
    return parser


def _serve_help(*, whole: bool) -> str:
    parser = argparse.ArgumentParser(
        prog="omni-ws serve",
        usage="omni-ws serve [--config FILE.toml] [--print-config] [--<setting> VALUE ...]",
        description="Run the server. Each setting is also an environment variable (OMNI_WS_PORT, "
        "OMNI_WS_STREAMING_INPUT__ENABLED) and a key of the configuration file. The command line takes precedence over "
        "the environment, and the environment over the file. Defaults are in [brackets].",
        parents=[_serve_options()],
        add_help=False,
    )
    add_flags(parser, only_often=not whole)
    return parser.format_help()


def _serve_command(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    options, settings = _serve_options().parse_known_args(arguments)
    if options.help or options.help_all:
        print(_serve_help(whole=options.help_all), end="")
        return 0

    def serve() -> int:
        loaded = load(settings, environ, options.config)
        if options.print_config:
            print(loaded.render(), end="")
            return 0
        if options.lan:
            from omni_ws.tools.opening import lan_server

            lan = lan_server(loaded)
            return _serve(lan.config, fetch=options.fetch, listening=lambda port: lan.tell(port, sys.stderr))
        opens = _opens_page(loaded.config, environ) if options.browser else None
        return _serve(loaded.config, fetch=options.fetch, listening=opens)

    return with_usage_errors(serve)


def _opens_page(config: ServerConfig, environ: Mapping[str, str]) -> Callable[[int], object] | None:
    """Return a function that opens the server's page, given the port; None if no browser can open or show it."""
    from omni_ws.tools.opening import (
        on_a_desktop,
        open_page,
        opens_by_itself,
    )

    return partial(open_page, config) if on_a_desktop(environ, sys.stderr) and opens_by_itself(config) else None


def with_usage_errors(serve: Callable[[], int]) -> int:
    """Run ``serve`` and return its exit status; print a ConfigurationError and return USAGE_ERROR for it."""
    try:
        return serve()
    except ConfigurationError as error:
        for problem in error.problems:
            _print_error(problem)
        return USAGE_ERROR


def _serve(config: ServerConfig, *, fetch: bool, listening: Callable[[int], object] | None = None) -> int:
    check_exposure(config)
    if fetch:
        from omni_ws.tools.weights import fetch_for_start

        try:
            fetch_for_start(config)
        except KeyboardInterrupt:
            return INTERRUPTED
        if config.chooses_llm:  # a language model is large: the server fetches it while it runs
            config = config.model_copy(update={"llm": config.llm.model_copy(update={"fetch": True})})
    check_available(config)
    configured_keys(config)
    # Imported late, so that --help and configuration errors appear without delay; if there are several workers, only
    # the workers need these imports.
    if config.workers > 1:
        from omni_ws.workers.supervisor import launch_workers as launch
    else:
        from omni_ws.server import launch_server as launch
    return exit_status(config, lambda: launch(config, listening=listening))


def exit_status(config: ServerConfig, serve: Callable[[], int]) -> int:
    """Run ``serve`` and return its exit status; print the error if the server fails to start.

    The status is FAILURE then, and INTERRUPTED after ^C. Raises ConfigurationError.
    """
    try:
        return serve()
    except KeyboardInterrupt:
        return INTERRUPTED
    except OmniError as error:
        _print_error(error.message)
    except OSError as error:
        _print_error(_explain(error, config))
    return FAILURE


def _explain(error: OSError, config: ServerConfig) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {config.port} on {config.host} is already in use; stop what uses it, or choose another with --port"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.EACCES) and error.filename is None:
        return f"cannot listen on {config.host}, port {config.port}: {os.strerror(error.errno)}"
    return str(error)


def _print_error(problem: str) -> None:
    print(f"omni-ws serve: error: {problem}", file=sys.stderr)
