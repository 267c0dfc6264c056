"""The floors of the package: a module imports only downward, and the lower floors stay free of loops and sockets."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from support.patience import PATIENCE_SEC

from omni_ws.config.parts import (
    FRONTS,
    OWN,
)

PACKAGE = Path(__file__).parents[1] / "omni_ws"

#: The floor of a module is that of the longest name here that it begins with.
FLOORS = {
    "omni_ws": 0,
    "omni_ws.errors": 0,
    "omni_ws.installing": 0,
    "omni_ws.config": 0,
    "omni_ws.metrics": 0,
    "omni_ws.profiler.events": 0,
    "omni_ws.web": 0,
    "omni_ws.core": 1,
    "omni_ws.wire": 1,
    "omni_ws.audio": 2,
    "omni_ws.media": 2,
    "omni_ws.weights": 2,
    "omni_ws.engine": 3,
    "omni_ws.engine_choice": 6,
    "omni_ws.calls": 4,
    "omni_ws.service": 4,
    "omni_ws.transport": 5,
    "omni_ws.client": 5,
    "omni_ws.generated": 5,
    "omni_ws.server": 6,
    "omni_ws.workers": 6,
    "omni_ws.cli": 6,
    "omni_ws.service.process": 4,
    "omni_ws.__main__": 6,
    "omni_ws.tools": 6,
    "omni_ws.caller": 6,
    "omni_ws.replay": 6,
    "omni_ws.scenarios": 6,
    "omni_ws.bench": 6,
    "omni_ws.talk": 6,
    "omni_ws.mcp_server": 6,
    "omni_ws.profiler": 6,
}

#: What may not be imported on a floor, by package.
SANS_IO = {"asyncio", "socket", "time", "threading", "websockets", "h11", "grpc", "torch", "vllm"}
BANNED = {
    "omni_ws.errors": SANS_IO,
    "omni_ws.config": SANS_IO,
    "omni_ws.core": SANS_IO,
    "omni_ws.wire": SANS_IO,
    "omni_ws.audio": {"asyncio", "socket"},
    "omni_ws.media": {"asyncio", "socket"},
    "omni_ws.calls": {"asyncio", "socket"},
    "omni_ws.weights": {"asyncio", "socket"},
    "omni_ws.service": {"socket", "websockets", "h11", "grpc"},
}

#: Heavy or optional libraries, and the places that may import each.
AT_HOME: dict[str, str | tuple[str, ...]] = {
    "torch": ("omni_ws.engine.omni", "omni_ws.engine.vllm"),
    "transformers": ("omni_ws.engine.omni", "omni_ws.engine.vllm"),
    "vllm": "omni_ws.engine.vllm",
    "espeakng_loader": "omni_ws.engine.tts",
    "ctranslate2": "omni_ws.engine.asr",
    "hibari": "omni_ws.engine.tts",
    "onnxruntime": "omni_ws.engine.tts",
    "xllamacpp": "omni_ws.engine.llm",
    "grpc": "omni_ws.transport",
    "aiortc": "omni_ws.transport.webrtc",
    "httpx": "omni_ws.engine.remote",
    "mcp": ("omni_ws.service.mcp", "omni_ws.mcp_server"),
    "mcp_types": ("omni_ws.service.mcp", "omni_ws.mcp_server"),
    "httpx2": "omni_ws.service.mcp",
    "httpcore": "omni_ws.transport.http.media_fetch",
    "cryptography": ("omni_ws.tools.lan_certificate", "omni_ws.service.store.records"),
    "redis": "omni_ws.service.store.redis_backend",
    "segno": ("omni_ws.tools.opening", "omni_ws.transport.routes.operations"),
    "opentelemetry": "omni_ws.service.observing.telemetry",
    # JSON is for msgspec, or for orjson where there is no schema. Upstreams cut texts within a character, which both
    # refuse.
    "json": ("omni_ws.engine.remote.event_stream",),
}

CLIENT_MAY_IMPORT = ("omni_ws.client", "omni_ws.wire", "omni_ws.core", "omni_ws.errors")

#: The folders of a floor that has wings, and modules in place of one: each imports from those before it alone.
WINGS = {
    "omni_ws.service": ("recording", "observing", "mcp", "store", "conversation", "sessions", "tokens"),
    "omni_ws.transport": (
        *("http", "recording", "native", "realtime", "webrtc", "telephony", "wyoming", "routes", "mode_b"),
        "grpc_salience",
    ),
}

#: The scale of 16-bit samples, which is at home in audio/pcm.py alone.
PCM_SCALE = re.compile(r"\b32_?76[78]\b")

#: Where a statement keeps those inside it.
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")

#: A module is one idea, and rarely above 800 lines: beyond this it is probably two.
MODULE_LINES = 1100
FUNCTION_LINES = 60


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


#: What a compiler made is as it is.
MODULES = {
    module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "generated" not in path.parents
}


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def at_home(module: str, homes: str | tuple[str, ...]) -> bool:
    return any(is_within(module, home) for home in ((homes,) if isinstance(homes, str) else homes))


@cache
def floor(module: str) -> int:
    # The bare package is on the ground, which says nothing about what else is in it.
    homes = [name for name in FLOORS if is_within(module, name) and (name != "omni_ws" or module == "omni_ws")]
    assert homes, f"{module} has no floor; give it one in {Path(__file__).name}"
    return FLOORS[max(homes, key=len)]


SOURCES = {module: path.read_text(encoding="utf-8") for module, path in MODULES.items()}


@cache
def trees() -> dict[str, ast.Module]:
    """Of all modules. To look for garbage meanwhile, where there is none, would take two thirds of the time."""
    gc.disable()
    try:
        return {module: ast.parse(source) for module, source in SOURCES.items()}
    finally:
        gc.freeze()
        gc.enable()


def tree(module: str) -> ast.Module:
    return trees()[module]


@cache
def statements(module: str) -> tuple[ast.AST, ...]:
    """Every statement of a module, also inside others. What is within expressions is left out, which is most of it."""
    found: list[ast.AST] = []
    blocks: list[ast.AST] = [tree(module)]
    while blocks:
        node = blocks.pop()
        inner = [one for name in _BLOCKS for one in getattr(node, name, ())]
        found += inner
        blocks += inner
    return tuple(found)


@cache
def imported(module: str) -> tuple[str, ...]:
    """Every name that a module imports, also inside functions; of ``from package import module``, both."""
    found: list[str] = []
    for node in statements(module):
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            inner = [name for name in names if name in MODULES]
            found.extend(inner)
            # ``from omni_ws import errors`` takes a module out of the package; the package is not what it wants.
            if len(inner) < len(names):
                found.append(node.module or "")
    return tuple(found)


def top_names(module: str) -> set[str]:
    return {name.partition(".")[0] for name in imported(module)}


def broken(found: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The modules that break a rule, each with what of it does."""
    return {module: what for module, what in found.items() if what}


def test_imports_point_downward() -> None:
    up = {
        module: [name for name in imported(module) if is_within(name, "omni_ws") and floor(name) > floor(module)]
        for module in MODULES
        # Its public names are imported when they are asked for.
        if module != "omni_ws"
    }
    assert broken(up) == {}, "these reach up"


def test_wings_import_in_one_direction() -> None:
    back = {}
    for package, order in WINGS.items():
        rank = {f"{package}.{wing}": place for place, wing in enumerate(order)}

        def place(name: str, rank: dict[str, int] = rank) -> int:
            # What stands beside the wings is for all of them.
            return rank.get(".".join(name.split(".")[:3]), -1)

        folders = {
            name.rpartition(".")[2]
            for name, path in MODULES.items()
            if path.name == "__init__.py" and name.startswith(package + ".")
        }
        assert folders <= set(order)
        assert rank.keys() <= MODULES.keys()
        for module in MODULES:
            if is_within(module, package):
                back[module] = [name for name in imported(module) if place(name) > place(module)]
    assert broken(back) == {}, "these reach into a wing behind their own"


def test_lower_floors_stay_free_of_loops_and_sockets() -> None:
    found = {}
    for module in MODULES:
        banned = {name for package, names in BANNED.items() if is_within(module, package) for name in names}
        found[module] = sorted(banned & top_names(module))
    assert broken(found) == {}, "these import what has no place on their floor"


def test_heavy_libraries_are_imported_at_home_only() -> None:
    astray = {
        module: [name for name in top_names(module) & AT_HOME.keys() if not at_home(module, AT_HOME[name])]
        for module in MODULES
    }
    assert broken(astray) == {}, "these import a library outside its place"


def test_the_client_stands_on_the_wire_alone() -> None:
    libraries = sys.stdlib_module_names | {"omni_ws", "websockets", "orjson", "msgspec"}

    def may(name: str) -> bool:
        if is_within(name, "omni_ws") and name != "omni_ws":
            return any(is_within(name, package) for package in CLIENT_MAY_IMPORT)
        return name.partition(".")[0] in libraries

    client = [module for module in MODULES if is_within(module, "omni_ws.client")]
    assert broken({module: [name for name in imported(module) if not may(name)] for module in client}) == {}
    assert client


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for module in MODULES:
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_16_bit_samples_have_one_scale() -> None:
    """By hand, conversions differ in their scale, round differently, or clip differently."""
    by_hand = {
        module: [f"line {number}" for number, line in enumerate(source.splitlines(), 1) if PCM_SCALE.search(line)]
        for module, source in SOURCES.items()
        if module != "omni_ws.audio.pcm"
    }
    assert broken(by_hand) == {}, "these convert 16-bit samples themselves; omni_ws.audio.pcm does it"


def test_modules_and_functions_are_small() -> None:
    large = {}
    for module, source in SOURCES.items():
        large[module] = [
            f"{node.name}: {length} lines"
            for node in statements(module)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
        ]
        if (lines := len(source.splitlines())) > MODULE_LINES:
            large[module].append(f"{lines} lines")
    assert broken(large) == {}, f"at most {MODULE_LINES} lines a module and {FUNCTION_LINES} a function"


def test_importing_the_server_loads_nothing_heavy() -> None:
    """One after the other, in one process: what none of them loads, all of them do not."""
    fronts = dict.fromkeys(place.partition(":")[0] for place in OWN[FRONTS].values())
    modules = ("omni_ws.engine.base", "omni_ws.cli", *fronts, "omni_ws.server")
    heavy = ["torch", "vllm", "ctranslate2", "hibari", "onnxruntime", "grpc", "httpx", "av"]
    heavy += ["opentelemetry", "mcp", "httpx2", "redis", "cryptography", "sqlite3"]
    program = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    print(module, *[name for name in {heavy} if name in sys.modules])
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SEC, check=True
    )
    assert ended.stdout.split() == [*modules]


def test_the_rules_can_fail() -> None:
    """A module that is nowhere and an import that reaches up are noticed."""
    with pytest.raises(AssertionError, match="has no floor"):
        floor("omni_ws.helpers")
    assert (
        floor("omni_ws.transport.http.front_door")
        > floor("omni_ws.service.conversation.conversation")
        > floor("omni_ws.wire")
    )
    assert "omni_ws.errors" in set(imported("omni_ws.cli"))
