"""The routes that start and stop profiles: permissions, folders, and the runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import h11
import pytest
from support.live_server import LiveServer, live_server
from support.native_client import native_client
from support.raw_http import RawResponse, post

from omni_ws.config.keys import ApiKey, digest
from omni_ws.engine.fake import EchoEngine
from omni_ws.errors import EngineFailed, Unauthenticated
from omni_ws.profiler import events
from omni_ws.transport.http.access import Authenticator
from omni_ws.transport.http.request import read_request
from omni_ws.transport.routes.operations import check_operator

EVENTS_ONLY = {"enable_torch": False}


def root(tmp_path: Path) -> dict[str, Any]:
    return {"profiler": {"root": tmp_path / "profiles"}}


def list_files(folder: Path) -> list[Path]:
    return list(folder.rglob("events_*.jsonl"))


async def one_request(server: LiveServer) -> None:
    async with native_client(server) as client:
        await client.say("hello")
        await client.answer()


def event_names(response: RawResponse) -> list[str]:
    lines = [line for name in response.json()["event_files"] for line in Path(name).read_text().splitlines()]
    return [json.loads(line)["event_name"] for line in lines]


async def test_events_are_recorded_from_start_to_stop(tmp_path: Path) -> None:
    async with live_server(**root(tmp_path)) as server:
        await one_request(server)
        started = await post(server.port, "/start_request_profile", {"run_id": "demo", "event_dir": "a/b"})
        assert (started.status, started.json()["run_id"]) == (200, "demo")
        assert started.json()["trace_path_template"] is None
        await one_request(server)
        stopped = await post(server.port, "/stop_request_profile", b"")
        await one_request(server)
    assert stopped.json()["stopped"] is True
    assert (stopped.json()["run_id"], stopped.json()["dropped_events"], stopped.json()["trace_files"]) == (
        "demo",
        0,
        [],
    )
    assert Path(stopped.json()["event_file"]).parent == tmp_path / "profiles" / "a" / "b"
    assert event_names(stopped).count("request_admission") == 1
    files = [Path(name) for name in stopped.json()["event_files"]]
    assert files[0] == Path(stopped.json()["event_file"])
    assert {file.name for file in files} >= {f"events_{one}_{os.getpid()}.jsonl" for one in ("coordinator", "input")}
    assert all(
        f"_{json.loads(line)['stage']}_" in file.name for file in files for line in file.read_text().splitlines()
    )
    assert events.recorder is None
    assert not server.app.sessions.observers.listening_to_outputs


async def test_start_profile_without_torch_records_events(tmp_path: Path) -> None:
    async with live_server(**root(tmp_path)) as server:
        started = await post(server.port, "/start_profile", EVENTS_ONLY)
        assert started.json()["run_id"].startswith("run_2")
        assert (await post(server.port, "/stop_profile", b"")).json()["run_id"] == started.json()["run_id"]


async def test_a_stop_of_another_run_is_ignored(tmp_path: Path) -> None:
    async with live_server(**root(tmp_path)) as server:
        assert (await post(server.port, "/stop_profile", b"")).json() == {"run_id": None, "stopped": False}
        await post(server.port, "/start_request_profile", {"run_id": "mine"})
        other = await post(server.port, "/stop_profile", {"run_id": "yours"})
        assert (other.status, other.json()) == (200, {"run_id": "yours", "stopped": False})
        assert events.recorder is not None
        assert (await post(server.port, "/stop_profile", {"run_id": "mine"})).json()["stopped"] is True


async def test_a_new_run_ends_the_one_before_and_the_same_one_goes_on(tmp_path: Path) -> None:
    async with live_server(**root(tmp_path)) as server:
        first = await post(server.port, "/start_request_profile", {"run_id": "one"})
        recorder = events.recorder
        again = await post(server.port, "/start_request_profile", {"run_id": "one"})
        assert again.json() == first.json()
        assert events.recorder is recorder
        second = await post(server.port, "/start_request_profile", {"run_id": "two"})
        assert second.json()["event_file"] != first.json()["event_file"]
        await one_request(server)
        stopped = await post(server.port, "/stop_request_profile", {})
    assert event_names(first) == []
    assert event_names(stopped)


async def test_neither_kind_of_profile_stops_the_other(tmp_path: Path) -> None:
    async with live_server(TracedEcho(), **root(tmp_path)) as server:
        whole = (await post(server.port, "/start_profile", {"run_id": "same"})).json()
        requests = (await post(server.port, "/start_request_profile", {"run_id": "same"})).json()
        assert whole["event_file"] != requests["event_file"]
        assert (whole["enable_torch"], requests["enable_torch"], requests["trace_path_template"]) == (True, False, None)
        await one_request(server)
        stopped = await post(server.port, "/stop_request_profile", {})
        assert (stopped.json()["event_file"], stopped.json()["trace_files"]) == (requests["event_file"], [])
        assert event_names(stopped).count("request_admission") == 1
        assert (await post(server.port, "/stop_request_profile", {"run_id": "same"})).json()["stopped"] is False
        await post(server.port, "/start_request_profile", {"run_id": "other"})
        await one_request(server)
        stopped = await post(server.port, "/stop_profile", {})
        assert stopped.json()["event_file"] == whole["event_file"]
        assert stopped.json()["trace_files"] == [f"{whole['trace_path_template']}_rank0.json"]
        assert event_names(stopped).count("request_admission") == 2
        assert (await post(server.port, "/stop_profile", {})).json()["stopped"] is False
        stopped = await post(server.port, "/stop_request_profile", {})
        assert event_names(stopped).count("request_admission") == 1
        assert events.recorder is None


async def test_two_profiles_do_not_write_to_one_folder(tmp_path: Path) -> None:
    async with live_server(**root(tmp_path)) as server:
        await post(server.port, "/start_request_profile", {"run_id": "one", "event_dir": "mine"})
        response = await post(server.port, "/start_profile", {"run_id": "two", "event_dir": "mine"})
        assert (response.status, response.error["param"]) == (400, "event_dir")


PRINTED_BODY = b"""{
  "run_id": "demo-run",
  "trace_path_template": "/tmp/profiles/demo-run/trace", // torch trace template
  "event_dir": "/tmp/profiles/demo-run/events", // request-event JSONL dir (optional)
  "enable_torch": true // set false to skip torch trace
}"""


async def test_who_sends_a_body_as_it_is_printed_elsewhere_is_told_what_to_change(tmp_path: Path) -> None:
    async with live_server(**root(tmp_path)) as server:
        response = await post(server.port, "/start_profile", PRINTED_BODY)
        assert (response.status, response.error["code"]) == (400, "invalid_frame")
        assert "JSON has no comments, remove them" in response.error["message"]
        without = b"\n".join(line.split(b" //")[0] for line in PRINTED_BODY.splitlines())
        response = await post(server.port, "/start_profile", without)
        assert (response.status, response.error["param"]) == (400, "event_dir")
        folder = str(tmp_path / "profiles")
        for part in (folder, "leave it out", "relative to that folder", "--profiler.root"):
            assert part in response.error["message"]
        for comment in (b'{"a": 1} # one', b"/* one */ {}"):
            response = await post(server.port, "/start_request_profile", comment)
            assert "remove them" in response.error["message"]
        response = await post(server.port, "/start_request_profile", b'{"a": "//}')
        assert "comments" not in response.error["message"]


async def test_a_server_that_ends_ends_its_profile(tmp_path: Path) -> None:
    async with live_server(**root(tmp_path)) as server:
        await post(server.port, "/start_request_profile", {})
        await one_request(server)
    assert events.recorder is None
    assert any('"request_admission"' in file.read_text() for file in list_files(tmp_path))


@pytest.mark.parametrize("path", ["/etc", "../elsewhere", "a/../..", ".", "\0", "link/x"])
@pytest.mark.parametrize("field", ["event_dir", "trace_path_template"])
async def test_paths_outside_of_the_root_are_refused(path: str, field: str, tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "link").symlink_to(tmp_path)
    for engine in (TracedEcho(), EchoEngine()):
        async with live_server(engine, **root(tmp_path)) as server:
            for enable_torch in (True, False):
                response = await post(server.port, "/start_profile", {field: path, "enable_torch": enable_torch})
                assert (response.status, response.error["param"]) == (400, field)
                assert response.error["code"] == "invalid_value"
    assert os.listdir(tmp_path) == ["profiles"]


async def test_the_default_folder_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    async with live_server() as server:
        for path in ("start_profile", "start_request_profile"):
            started = await post(server.port, f"/{path}", {"run_id": path})
            assert (started.status, started.json()["enable_torch"]) == (200, False)
            assert Path(started.json()["event_file"]).parent == tmp_path / "omni_ws" / "profiles" / path / "events"


async def test_without_keys_only_clients_of_this_machine_may() -> None:
    async with live_server() as server:
        for header in ("X-Forwarded-For: 127.0.0.1", "Forwarded: for=127.0.0.1"):
            response = await post(server.port, "/start_request_profile", {}, header)
            assert (response.status, response.error["code"]) == (401, "unauthenticated")
    head = h11.Request(method="POST", target="/start_profile", headers=[("Host", "x")])
    for address in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        check_operator(Authenticator(()), read_request(head, client=address, secure=False), "profiles")
    with pytest.raises(Unauthenticated, match="own machine"):
        check_operator(Authenticator(()), read_request(head, client="192.0.2.1", secure=False), "profiles")


async def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("a file")
    async with live_server(**root(tmp_path)) as server:
        response = await post(server.port, "/start_request_profile", {})
        assert (response.status, response.error["param"]) == (400, "event_dir")


WRONG_KINDS: list[tuple[dict[str, Any], str]] = [
    ({"run_id": ""}, "run_id"),
    ({"run_id": "a/b"}, "run_id"),
    ({"run_id": ".x"}, "run_id"),
    ({"run_id": "x" * 129}, "run_id"),
    ({"run_id": 1}, "run_id"),
    ({"event_dir": []}, "event_dir"),
    ({"enable_torch": "no"}, "enable_torch"),
]


async def test_fields_of_the_wrong_kind(tmp_path: Path) -> None:
    async with live_server(**root(tmp_path)) as server:
        for fields, param in WRONG_KINDS:
            response = await post(server.port, "/start_profile", fields)
            assert (response.status, response.error["param"]) == (400, param), fields
            assert (await post(server.port, "/start_request_profile", {"run_id": "x" * 128})).status == 200, fields


async def test_only_administrators_profile(tmp_path: Path) -> None:
    keys = (
        ApiKey(name="user", key_sha256=digest("user-key")),
        ApiKey(name="admin", key_sha256=digest("admin-key"), admin=True),
    )
    async with live_server(keys=keys, **root(tmp_path)) as server:
        for path in ("/start_profile", "/stop_profile", "/start_request_profile", "/stop_request_profile"):
            for headers in ((), ("Authorization: Bearer user-key",)):
                response = await post(server.port, path, EVENTS_ONLY, *headers)
                assert (response.status, response.error["code"]) == (401, "unauthenticated")
            response = await post(server.port, path, EVENTS_ONLY, "Authorization: Bearer admin-key")
            assert response.status == 200


# traces


class TracedEcho(EchoEngine):
    """An engine whose traces are files with one word."""

    fails = False
    can_trace = True

    def __init__(self) -> None:
        super().__init__()
        self.template: Path | None = None

    async def start_trace(self, template: Path) -> None:
        if self.fails:
            raise EngineFailed("no")
        self.template = template

    async def stop_trace(self) -> tuple[Path, ...]:
        assert self.template is not None
        file = self.template.with_name(f"{self.template.name}_rank0.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("trace")
        self.template = None
        return (file,)


async def test_a_trace_goes_where_its_template_says(tmp_path: Path) -> None:
    template = str(tmp_path / "profiles" / "demo" / "trace")
    async with live_server(engine := TracedEcho(), **root(tmp_path)) as server:
        started = await post(server.port, "/start_profile", {"trace_path_template": template})
        assert started.json()["enable_torch"] is True
        assert started.json()["trace_path_template"] == template == str(engine.template)
        assert (await post(server.port, "/stop_profile", {})).json()["trace_files"] == [f"{template}_rank0.json"]


async def test_an_engine_that_cannot_trace_has_its_events_recorded(tmp_path: Path) -> None:
    untraced = TracedEcho()
    untraced.can_trace = False
    for engine in (EchoEngine(), untraced):
        async with live_server(engine, **root(tmp_path)) as server:
            answer = (await post(server.port, "/start_profile", {"run_id": "x", "enable_torch": True})).json()
            assert (answer["enable_torch"], answer["trace_path_template"]) == (False, None)
            assert (await post(server.port, "/stop_profile", {})).json()["trace_files"] == []


async def test_a_trace_that_does_not_start_leaves_nothing_running(tmp_path: Path) -> None:
    engine = TracedEcho()
    engine.fails = True
    async with live_server(engine, **root(tmp_path)) as server:
        assert (await post(server.port, "/start_profile", {})).status == 500
        assert events.recorder is None
        assert (await post(server.port, "/stop_profile", {})).json()["stopped"] is False
