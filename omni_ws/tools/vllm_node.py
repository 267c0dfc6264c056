"""``omni-ws vllm-node``: runs a part of a server's vLLM model on another machine than the server's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from omni_ws.cli import FAILURE, USAGE_ERROR
from omni_ws.config.values import ConfigurationError
from omni_ws.installing import INSTALL_VLLM
from omni_ws.tools.readout_vectors import named_model, print_errors


def run_vllm_node(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command until a signal ends it; return its exit status: 1 if it failed, 2 for wrong usage."""
    options, settings = _node_parser().parse_known_args(arguments)
    try:
        model, args = named_model(settings, environ, options.config)
        if find_spec("vllm") is None:
            raise ConfigurationError([f"the vllm engine needs vLLM: {INSTALL_VLLM}"])
        from omni_ws.engine.vllm.language_model import LanguageModel
        from omni_ws.engine.vllm.nodes import run_node

        run_node(LanguageModel("model", {**args, "model": model}, setting="vllm.args").engine_args())
    except ConfigurationError as error:
        return print_errors("vllm-node", error.problems, USAGE_ERROR)
    except OSError as error:
        return print_errors("vllm-node", [str(error)], FAILURE)


def _node_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-ws vllm-node",
        usage="omni-ws vllm-node --model NAME-OR-FOLDER [--vllm.args.<name> VALUE ...] [--config FILE.toml]",
        description="Run a part of a server's vLLM model on this machine, until a signal ends it. The server's log has "
        "the whole line while it waits for this machine: the server's own arguments, its address, and the part.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="read the vllm settings from this file")
    return parser
