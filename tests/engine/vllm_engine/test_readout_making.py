"""Readout vectors from prompts: the files accepted, and a comparison of the vectors with a reference."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import Ended, run_command
from support.salience_server import salience_server

from omni_ws.config.model import VllmConfig
from omni_ws.config.values import ConfigurationError
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.readouts import Readouts, load_concepts, load_vectors, make_vectors
from omni_ws.tools.vllm import make_readout_vectors

PROMPTS = {
    "loud": {"positive": ["come here!", "stop!", "what a day!"], "negative": ["come here", "stop", "what a day"]},
    "asking": {"positive": ["you come?", "is it?"], "negative": ["you come", "is it", "so be it"]},
}


@pytest.mark.parametrize("kind", ["json", "toml"])
def test_prompts_in_a_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"prompts.{kind}"
    if kind == "json":
        file.write_text(json.dumps(PROMPTS))
    else:
        lines = [
            f"[{name}]\npositive = {json.dumps(one['positive'])}\nnegative = {json.dumps(one['negative'])}"
            for name, one in PROMPTS.items()
        ]
        file.write_text("\n".join(lines))
    assert load_concepts(file) == PROMPTS
    assert list(load_concepts(file)) == ["loud", "asking"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "cannot read the prompts"),
        ("{", "cannot read the prompts"),
        ("[]", "no concepts"),
        ("{}", "no concepts"),
        ('{"a": 3}', "a: a concept must have exactly positive and negative"),
        ('{"a": {"positive": ["x"]}}', "a: a concept must have exactly positive and negative"),
        ('{"a": {"positive": ["x"], "negative": ["y"], "neutral": []}}', "must have exactly positive and negative"),
        ('{"a": {"positive": [], "negative": ["y"]}}', "a.positive must be a list of at least one prompt"),
        ('{"a": {"positive": ["x"], "negative": "y"}}', "a.negative must be a list of at least one prompt"),
        ('{"a": {"positive": ["x"], "negative": [""]}}', "a.negative must be a list of at least one prompt"),
    ],
)
def test_a_file_that_holds_no_prompts(tmp_path: Path, text: str | None, match: str) -> None:
    file = tmp_path / "prompts.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=match):
        load_concepts(file)


async def run(*arguments: str) -> Ended:
    return await run_command(sys.executable, "-m", "omni_ws", "readout-vectors", *arguments)


@pytest.mark.vllm
@pytest.mark.slow
async def test_vectors_from_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from support.tiny_models import ENGINE_ARGS, build_text_model
    from support.vllm_engine import Reference, close
    from transformers import AutoTokenizer

    model = build_text_model(tmp_path / "model")
    prompts, out = tmp_path / "prompts.json", tmp_path / "made"
    prompts.write_text(json.dumps(PROMPTS))
    given = [f"--vllm.args.{name}={json.dumps(value)}" for name, value in ENGINE_ARGS.items()]
    command = ["--prompts", str(prompts), "--model", str(model), "--out", str(out), *given]
    assert await asyncio.to_thread(make_readout_vectors, [*command, "--layers", "0,1"], {}) == 0
    assert f"--grpc.readout-vectors {out / 'readout.safetensors'}" in capsys.readouterr().out

    made = load_vectors(out / "readout.safetensors", out / "readout.json")
    assert (made.manifest.concepts, made.manifest.layers) == (("loud", "asking"), (0, 1))
    reference, tokenizer = Reference(model), AutoTokenizer.from_pretrained(model)

    def streams(texts: list[str]) -> Any:
        """Return an array of shape (prompts, layers, hidden size)."""
        read = []
        for text in texts:
            reference.run(tokenizer(text).input_ids)
            read.append(torch.stack([reference.streams[layer][-1] for layer in (0, 1)]).numpy())
        return np.stack(read)

    #: The distance between the two kinds of prompts of each concept, at each layer.
    apart: list[np.ndarray[Any, Any]] = []
    for index, one in enumerate(PROMPTS.values()):
        wanted = streams(one["positive"]).mean(0) - streams(one["negative"]).mean(0)
        apart.append(np.linalg.norm(wanted, axis=1))
        wanted /= apart[-1][:, None]
        assert close(np.stack([matrix[index] for matrix in made.matrices]), wanted)

    engine = VllmEngine(VllmConfig(model=str(model), args=dict(ENGINE_ARGS)), readouts=Readouts(made))
    async with salience_server(engine) as server:

        async def read(texts: list[str]) -> np.ndarray[Any, Any]:
            """Return the mean at the last tokens, of shape (layers, concepts)."""
            session, found = await server.open(), []
            for text in texts:
                tokens = tokenizer(text).input_ids
                place = {"start": len(tokens) - 1, "end": len(tokens)}
                length = len(await server.dump(session))
                (token,), _ = await server.events(session, [*tokens], 0, truncating=length > 0, readout_ranges=[place])
                found.append(np.array(token.readout).reshape(2, 2))
            return np.asarray(np.mean(found, axis=0))

        for index, one in enumerate(PROMPTS.values()):
            seen = await read(one["positive"]) - await read(one["negative"])
            assert seen[:, index] == pytest.approx(apart[index], rel=1e-2)


@pytest.mark.vllm
@pytest.mark.slow
async def test_layers_that_the_model_lacks(tmp_path: Path) -> None:
    from support.tiny_models import ENGINE_ARGS, build_text_model

    concepts = PROMPTS
    model = str(build_text_model(tmp_path / "model"))
    with pytest.raises(ConfigurationError, match=r"layers \[2\]; the model has only 2"):
        await make_vectors(concepts, (0, 2), model=model, args=ENGINE_ARGS)


@pytest.mark.vllm
def test_the_folder_of_the_model_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompts", "any.json", "--layers", "1", "--model", str(tmp_path), "--out", str(tmp_path)]
    assert make_readout_vectors(arguments, {}) == 2
    assert "is the folder of the model" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((), "--prompts"),
        (("--prompts", "p.toml", "--layers", "1"), "--model"),
        (("--prompts", "p.toml", "--layers", "1", "--modle", "m"), "unknown flag --modle"),
        (("--prompts", "p.toml", "--layers", "-1", "--model", "m"), "layers"),
        (("--prompts", "p.toml", "--layers", "one", "--model", "m"), "is not a list of layers"),
    ],
)
async def test_a_command_line_that_asks_for_nothing_known(arguments: tuple[str, ...], match: str) -> None:
    ended = await run(*arguments)
    assert (ended.status, match in ended.errors) == (2, True), ended.errors
    assert "Traceback" not in ended.errors
