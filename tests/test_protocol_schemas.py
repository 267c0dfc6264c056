"""The machine-readable parts of the specification: they are valid, agree with the code, and with each other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml
from msgspec import Struct
from openai.types.live import ClientEvent, ServerEvent
from referencing import Registry
from referencing.jsonschema import DRAFT202012
from support.live_server import routes_of

from omni_ws.config.model import ServerConfig
from omni_ws.engine.fake import EchoEngine
from omni_ws.errors import leaves
from omni_ws.server import create_app
from omni_ws.tools.documents import frames_schema
from omni_ws.wire.frames import CLIENT_FRAMES, CLIENT_TYPES
from omni_ws.wire.openai_requests import ChatBody, CompletionBody, SpeechBody, TranscriptionBody
from omni_ws.wire.realtime_session import ClientSecretBody
from omni_ws.wire.server_frames import SERVER_FRAMES
from omni_ws.wire.session_config import FIELDS

PROTOCOL = Path(__file__).parents[1] / "protocol"
SERVER_TYPES = frozenset(str(frame.__struct_config__.tag) for frame in SERVER_FRAMES)
ROUTES = {
    "/": {"get"},
    "/browser/{name}": {"get"},
    "/browser/calls/{name}": {"get"},
    "/client.js": {"get"},
    "/client/{name}": {"get"},
    "/phone": {"get"},
    "/widget.js": {"get"},
    "/widget/{name}": {"get"},
    "/fetch_llm": {"post"},
    "/health": {"get"},
    "/metrics": {"get"},
    "/openapi.json": {"get"},
    "/v1/models": {"get"},
    "/v1/models/{id}": {"get"},
    "/v1/chat/completions": {"post"},
    "/v1/completions": {"post"},
    "/v1/audio/speech": {"post"},
    "/v1/audio/transcriptions": {"post"},
    "/v1/audio/translations": {"post"},
    "/v1/sessions/{id}": {"delete"},
    "/v1/streaming_input/client_secrets": {"post"},
    "/v1/streaming_input/sessions": {"post"},
    "/v1/streaming_input/sessions/{id}": {"get", "patch", "delete"},
    "/v1/streaming_input/sessions/{id}/chunks": {"post"},
    "/v1/streaming_input/sessions/{id}/append": {"post"},
    "/v1/streaming_input/sessions/{id}/finish": {"post"},
    "/v1/streaming_input/sessions/{id}/result": {"get"},
    "/v1/realtime/client_secrets": {"post"},
    "/v1/realtime/translations/client_secrets": {"post"},
    "/v1/realtime/calls": {"post"},
    "/v1/realtime/calls/{call_id}/hangup": {"post"},
    "/v1/live/sessions": {"post"},
    "/v1/live/sessions/{session_id}/hangup": {"post"},
    "/v1/live/sessions/{session_id}/fork": {"post"},
    "/v1/live/sessions/{session_id}/content": {"get"},
    "/calls": {"get"},
    "/calls/{id}": {"get"},
    "/calls/{id}/call.json": {"get"},
    "/calls/{id}/sound.wav": {"get"},
    "/calls/{id}/call.zip": {"get"},
    "/calls/{id}/fork": {"post"},
    "/start_profile": {"post"},
    "/stop_profile": {"post"},
    "/start_request_profile": {"post"},
    "/stop_request_profile": {"post"},
}

#: Served to be refused by name (docs/live.md).
REFUSED = {
    f"/v1/live/sessions/{{session_id}}/{step}": {method}
    for step, method in (
        ("accept", "post"),
        ("reject", "post"),
        ("refer", "post"),
    )
}

#: Served on the same port, and described in asyncapi.yaml and live.asyncapi.yaml.
NOT_HTTP = {
    path: {"GET"}
    for path in (
        "/v1/streaming_input",
        "/v1/realtime",
        "/v1/realtime/translations",
        "/v1/live/sessions",
        "/v1/live/sessions/{session_id}/attach",
        "/v1/live/sessions/{session_id}/fork",
    )
}
BODIES: dict[str, type[Struct]] = {
    "ClientSecretRequest": ClientSecretBody,
    "ChatRequest": ChatBody,
    "CompletionRequest": CompletionBody,
    "SpeechRequest": SpeechBody,
    "TranscriptionRequest": TranscriptionBody,
}

Document = dict[str, Any]


@pytest.fixture(scope="module")
def frames() -> Document:
    document: Document = json.loads((PROTOCOL / "frames.schema.json").read_text(encoding="utf-8"))
    return document


@pytest.fixture(scope="module")
def openapi() -> Document:
    document: Document = json.loads((PROTOCOL / "openapi.json").read_text(encoding="utf-8"))
    return document


@pytest.fixture(scope="module")
def asyncapi() -> Document:
    document: Document = yaml.safe_load((PROTOCOL / "asyncapi.yaml").read_text(encoding="utf-8"))
    return document


def validator(document: Document, pointer: str) -> jsonschema.Draft202012Validator:
    """For the schema at ``pointer`` inside ``document``, whose references stay inside it."""
    registry = Registry().with_resource("urn:document", DRAFT202012.create_resource(document))
    return jsonschema.Draft202012Validator({"$ref": f"urn:document#{pointer}"}, registry=registry)


def resolve(document: Any, pointer: str) -> Any:
    for part in pointer.lstrip("/").split("/"):
        document = document[part.replace("~1", "/").replace("~0", "~")]
    return document


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def load(name: str) -> list[Document]:
    return [json.loads(line) for line in (PROTOCOL / "vectors" / name).read_text(encoding="utf-8").splitlines()]


# --- JSON Schema of the frames


def test_schema_on_file_is_the_one_of_the_code() -> None:
    written = (PROTOCOL / "frames.schema.json").read_text(encoding="utf-8")
    assert written == frames_schema(), "run: python -m omni_ws.tools.documents"


def test_frame_schema_is_valid_and_every_reference_in_it_resolves(frames: Document) -> None:
    jsonschema.Draft202012Validator.check_schema(frames)
    for reference in references(frames):
        resolve(frames, reference.removeprefix("#"))


def test_every_frame_type_is_in_the_schema(frames: Document) -> None:
    for side, types in (("ClientFrame", CLIENT_FRAMES), ("ServerFrame", SERVER_FRAMES)):
        listed = [option["$ref"].rpartition("/")[2] for option in frames["$defs"][side]["oneOf"]]
        assert listed == [frame.__name__ for frame in types]
        for name, frame in zip(listed, types, strict=True):
            assert frames["$defs"][name]["properties"]["type"] == {"enum": [frame.__struct_config__.tag]}


def test_every_field_of_the_configuration_may_be_null_in_a_patch(frames: Document) -> None:
    validate = validator(frames, "/$defs/ClientFrame")
    assert set(frames["$defs"]["SessionConfigFrame"]["properties"]) == FIELDS | {"type", "history_items"}
    for field in FIELDS:
        validate.validate({"type": "session_config", field: None})
    inner = {"input_audio", "output_audio", "start_policy", "sampling", "turn_detection"}
    for field in inner:
        options = frames["$defs"]["SessionConfigFrame"]["properties"][field]["anyOf"]
        name = next(option["$ref"].rpartition("/")[2] for option in options if "$ref" in option)
        for inside in frames["$defs"][name]["properties"]:
            validate.validate({"type": "session_config", field: {inside: None}})


def test_schema_takes_the_client_frames_that_the_server_takes(frames: Document) -> None:
    schema = validator(frames, "/$defs/ClientFrame")
    for vector in load("client_frames.jsonl"):
        if "frame" not in vector or not vector.get("schema_sees", True):
            continue
        try:
            frame = json.loads(vector["frame"], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        except (json.JSONDecodeError, pytest.fail.Exception):
            assert vector["expect"]["error"] == "invalid_frame", vector["name"]
            continue
        if isinstance(frame, dict) and "\\ud800" in vector["frame"]:
            continue  # half a surrogate pair is no text, yet Python's parser makes a string of it
        assert schema.is_valid(frame) is ("error" not in vector["expect"]), vector["name"]


def test_schema_takes_the_patches_that_the_server_takes(frames: Document) -> None:
    validate = validator(frames, "/$defs/SessionConfigFrame")
    for vector in load("session_config.jsonl"):
        for step in vector["steps"]:
            if "effective" in step:
                validate.validate({"type": "session_config", **step["patch"]})


def test_schema_takes_every_server_frame(frames: Document) -> None:
    schema = validator(frames, "/$defs/ServerFrame")
    for vector in load("server_frames.jsonl"):
        frame = json.loads(vector["frame"])
        schema.validate(frame)
        for field in frames["$defs"][f"{_definition_of(frame['type'])}"]["required"]:
            without = {key: value for key, value in frame.items() if key != field}
            assert not schema.is_valid(without), (vector["name"], field)


def _definition_of(frame_type: str) -> str:
    return next(frame.__name__ for frame in SERVER_FRAMES if frame.__struct_config__.tag == frame_type)


@pytest.mark.parametrize(
    "broken",
    [
        {"type": "output_chunk", "request_id": "req_1", "sequence_id": 0},
        {"type": "output_chunk", "request_id": "req_1", "sequence_id": 0, "modality": "text"},
        {"type": "output_chunk", "request_id": "req_1", "sequence_id": 0, "modality": "audio", "payload": "AAA="},
        {"type": "output_chunk", "request_id": "req_1", "sequence_id": 0, "final": True, "finish_reason": "stop"},
        {"type": "output_chunk", "request_id": "req_1", "sequence_id": 0, "modality": "smell", "text": "a"},
        {"type": "error", "error": {"code": "no_such_code", "message": ""}},
        {"type": "session_closing", "reason": "tired", "retryable": True, "time_left_ms": 0},
    ],
)
def test_schema_refuses_server_frames_that_say_too_little_or_too_much(broken: Document, frames: Document) -> None:
    assert not validator(frames, "/$defs/ServerFrame").is_valid(broken)


# --- AsyncAPI


def test_asyncapi_has_every_frame_type_on_its_side(asyncapi: Document) -> None:
    assert asyncapi["asyncapi"] == "3.0.0"
    messages = asyncapi["components"]["messages"]
    assert set(messages) == CLIENT_TYPES | SERVER_TYPES | {"binary_input_chunk", "binary_output_chunk"}
    sides = {"receiveFromClient": CLIENT_TYPES, "sendToClient": SERVER_TYPES}
    for operation, types in sides.items():
        named = {message["$ref"].rpartition("/")[2] for message in asyncapi["operations"][operation]["messages"]}
        assert {name for name in named if not name.startswith("binary_")} == types


def test_asyncapi_names_the_schema_of_each_type(asyncapi: Document, frames: Document) -> None:
    for name in CLIENT_TYPES | SERVER_TYPES:
        reference = asyncapi["components"]["messages"][name]["payload"]["$ref"]
        schema = resolve(frames, reference.removeprefix("./frames.schema.json#"))
        assert schema["properties"]["type"] == {"enum": [name]}


def test_every_reference_of_asyncapi_resolves(asyncapi: Document) -> None:
    for reference in references(asyncapi):
        file, _, pointer = reference.partition("#")
        document = json.loads((PROTOCOL / file).read_text(encoding="utf-8")) if file else asyncapi
        resolve(document, pointer)


def test_the_asyncapi_of_live_sessions_has_the_events_of_openai() -> None:
    document = yaml.safe_load((PROTOCOL / "live.asyncapi.yaml").read_text(encoding="utf-8"))
    messages = document["components"]["messages"]
    for operation, union in (("receiveFromClient", ClientEvent), ("sendToClient", ServerEvent)):
        known = {
            kind: one for one in get_args(get_args(union)[0]) for kind in get_args(one.model_fields["type"].annotation)
        }
        for reference in document["operations"][operation]["messages"]:
            payload = messages[reference["$ref"].rpartition("/")[2]]["payload"]
            fields = known[payload["properties"]["type"]["const"]].model_fields
            assert set(payload["required"]) <= set(payload["properties"]) <= set(fields)
            assert {name for name, field in fields.items() if field.is_required()} <= set(payload["required"])
    for reference in references(document):
        resolve(document, reference.partition("#")[2])


# --- OpenAPI


def test_openapi_has_the_routes_of_this_version(openapi: Document) -> None:
    assert openapi["openapi"].startswith("3.1.")
    assert {path: set(item) for path, item in openapi["paths"].items()} == ROUTES | REFUSED
    for reference in references(openapi):
        resolve(openapi, reference.removeprefix("#"))


def test_openapi_has_every_route_that_is_served_and_every_field_that_is_read(openapi: Document) -> None:
    app = create_app(EchoEngine(), ServerConfig())
    served = {path.replace(":path}", "}"): methods for path, methods in routes_of(app).items()}
    described = {path: {method.upper() for method in item} for path, item in openapi["paths"].items()}
    for path, methods in NOT_HTTP.items():
        described[path] = described.get(path, set()) | methods
    assert served == described
    for name, body in BODIES.items():
        properties = openapi["components"]["schemas"][name]["properties"].keys()
        read = {field.removesuffix("[]") for field in properties}
        assert [field for field in body.__struct_fields__ if field not in read] == [], name


def test_openapi_operations_are_named_once_and_answer(openapi: Document) -> None:
    operations = [operation for item in openapi["paths"].values() for operation in item.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    for path, item in openapi["paths"].items():
        for operation in item.values():
            succeeds = any(status.startswith("2") for status in operation["responses"])
            assert succeeds is (path not in REFUSED), path
            parameters = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
            assert parameters == set(re.findall(r"{(\w+)}", path))


def test_openapi_schemas_are_valid_and_so_are_their_examples(openapi: Document) -> None:
    for name, schema in openapi["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        for example in schema.get("examples", []):
            validator(openapi, f"/components/schemas/{name}").validate(example)


def test_openapi_examples_of_bodies_are_valid(openapi: Document) -> None:
    checked = 0
    for pointer, media in _media_types(openapi, ""):
        if "example" in media:
            validator(openapi, f"{pointer}/schema").validate(media["example"])
            checked += 1
    assert checked >= 15


def test_openapi_errors_are_those_of_the_table(openapi: Document) -> None:
    statuses = {error.wire.code: error.wire.http_status for error in leaves()}
    operations = [operation for item in openapi["paths"].values() for operation in item.values()]
    answers = [answer for operation in operations for answer in operation["responses"].items()]
    for status, answer in answers:
        if "$ref" in answer:
            body = resolve(openapi, answer["$ref"].removeprefix("#"))["content"]["application/json"]["example"]
            assert statuses[body["error"]["code"]] == int(status)


def _media_types(node: Any, pointer: str) -> Iterator[tuple[str, Document]]:
    """Every media type object, under a ``content``, with its place."""
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        here = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
        if key == "content" and isinstance(value, dict):
            for name, media in value.items():
                if isinstance(media, dict) and "schema" in media:
                    yield f"{here}/{name.replace('~', '~0').replace('/', '~1')}", media
        yield from _media_types(value, here)
