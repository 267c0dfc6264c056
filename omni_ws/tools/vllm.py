"""Commands for vLLM: ``omni-ws readout-vectors`` and ``omni-ws vllm-node``.

The first computes the files that enable readouts, from example prompts for each concept. The second runs a part of a
server's vLLM model on another machine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from omni_ws.cli import FAILURE, INTERRUPTED, USAGE_ERROR
from omni_ws.config import load
from omni_ws.config.values import ConfigurationError
from omni_ws.errors import OmniError
from omni_ws.installing import INSTALL_VLLM

VECTORS: Final = "readout.safetensors"
MANIFEST: Final = "readout.json"


def make_readout_vectors(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command ``readout-vectors``, which writes VECTORS and MANIFEST to a folder.

    Returns its exit status: 0, 1 if it failed, 2 for wrong usage, 130 after ^C.
    """
    options, settings = _readout_parser().parse_known_args(arguments)
    try:
        model, args = named_model(settings, environ, options.config)
        _make(options.prompts, options.layers, options.out, model=model, args=args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ConfigurationError as error:
        return print_errors("readout-vectors", error.problems, USAGE_ERROR)
    except OmniError as error:
        return print_errors("readout-vectors", [error.message], FAILURE)
    except OSError as error:
        return print_errors("readout-vectors", [str(error)], FAILURE)
    return 0


def _make(prompts: Path, layers: Sequence[int], folder: Path, *, model: str, args: Mapping[str, object]) -> None:
    for package in ("vllm", "safetensors"):
        if find_spec(package) is None:
            raise ConfigurationError([f"the vllm engine needs vLLM: {INSTALL_VLLM}"])
    if Path(model).is_dir() and folder.resolve() == Path(model).resolve():
        raise ConfigurationError([f"{folder} is the folder of the model, where vLLM would load the vectors as weights"])
    from omni_ws.engine.vllm.readouts import load_concepts, make_vectors, save_vectors

    concepts = load_concepts(prompts)
    folder.mkdir(parents=True, exist_ok=True)
    made = asyncio.run(make_vectors(concepts, layers, model=model, args=args))
    files = folder / VECTORS, folder / MANIFEST
    save_vectors(dict(zip(layers, made.matrices, strict=True)), [*concepts], *files)
    print(f"{len(concepts)} concepts after {len(layers)} layers. Serve them with")
    print(f"--grpc.readout-vectors {files[0]} --grpc.readout-manifest {files[1]}")


def _readout_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-ws readout-vectors",
        usage="omni-ws readout-vectors --prompts FILE --layers N,N,… --model NAME-OR-FOLDER [--out FOLDER] "
        "[--vllm.args.<name> VALUE ...]",
        description="Compute readout vectors from prompts with a concept and prompts without it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help="TOML or JSON: concept = {positive, negative}"
    )
    parser.add_argument("--layers", type=_layers, required=True, metavar="N,N,…", help="decoder layers, counted from 0")
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="FOLDER", help=f"output folder of {VECTORS} and {MANIFEST} [.]"
    )
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="read the vllm settings from this file")
    return parser


def _layers(text: str) -> list[int]:
    try:
        layers = sorted({int(one) for one in text.split(",")})
    except ValueError:
        layers = [-1]
    if layers[0] < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers such as 10,20")
    return layers


def named_model(settings: Sequence[str], environ: Mapping[str, str], file: Path | None) -> tuple[str, dict[str, Any]]:
    """Return the name of the model in the settings, and the arguments for vLLM. Raises ConfigurationError."""
    vllm = load(settings, environ, file).config.vllm
    if vllm.model is None:
        raise ConfigurationError(["a model is needed: --model NAME-OR-FOLDER"])
    return vllm.model, vllm.args


def print_errors(command: str, problems: Sequence[str], status: int) -> int:
    for problem in problems:
        print(f"omni-ws {command}: error: {problem}", file=sys.stderr)
    return status


# ``omni-ws vllm-node``: runs a part of a server's vLLM model on another machine than the server's.


def run_vllm_node(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command ``vllm-node`` until a signal ends it, which raises SystemExit.

    Returns the exit status only if it fails: 1, or 2 for misuse.
    """
    options, settings = _node_parser().parse_known_args(arguments)
    try:
        model, args = named_model(settings, environ, options.config)
        if find_spec("vllm") is None:
            raise ConfigurationError([f"the vllm engine needs vLLM: {INSTALL_VLLM}"])
        from omni_ws.engine.vllm.language_model import LanguageModel, run_node

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
