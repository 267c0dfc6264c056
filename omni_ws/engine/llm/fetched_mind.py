"""FetchedMind: the language model that ``--llm auto`` fetches, or that was fetched before, and what allows it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from omni_ws.config.model import ServerConfig
from omni_ws.engine.base import Engine
from omni_ws.engine.threads import available_memory, cores
from omni_ws.installing import fetch_command, install_command
from omni_ws.weights.cache import WeightsCache, weights_cache
from omni_ws.weights.sources import Fetching, PinnedWeights, WeightsError, pinned_weights

#: What this machine must have free for a model in this server: bytes of memory, cores, and bytes of disk for the fetch.
LEAST_MEMORY: Final = 4_000_000_000
LEAST_CORES: Final = 2
LEAST_DISK: Final = 3_000_000_000
#: The model that is fetched.
FETCHED: Final = "qwen"
#: Models that are used if they were fetched before, the best first. The others are often wrong: rules are better.
_USED: Final = ("qwen", "qwen3-1.7b", "qwen2.5-1.5b", "qwen3-0.6b")
#: What runs a model, and what talks with it.
_PACKAGES: Final = ("xllamacpp", "httpx")
#: How to have no language model.
RULES_ALONE: Final = "for rules alone: --llm rules, or make serve LLM=rules"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do about a model in this server: whether it begins by itself, or if asked, and a line about that.

    ``fetches``: its weights are to be fetched, too. Without that, those that are here have to do.
    """

    begins: bool
    can_begin: bool
    why: str
    fetches: bool = False


class FetchedMind:
    """The model that was fetched before, or is to be fetched.

    ``make`` creates the engine of weights by their name. Nothing is fetched by itself unless ``llm.fetch`` says so
    (``omni-ws serve --fetch``), nor with keys, several workers, or ``CI`` in the environment.
    """

    def __init__(
        self,
        config: ServerConfig,
        make: Callable[[str], Engine],
        *,
        titles: Mapping[str, str],
        environ: Mapping[str, str] = os.environ,
        cache: WeightsCache | None = None,
    ) -> None:
        self._config = config
        self._make = make
        self._titles = titles
        self._environ = environ
        self._cache = cache or weights_cache()
        #: Models whose files are here, and are not those that were pinned.
        self._changed: set[str] = set()
        self._name = FETCHED

    @property
    def model(self) -> str:
        """The name of the model, which ``plan`` chooses."""
        return self._titles[self._name]

    @property
    def _weights(self) -> PinnedWeights:
        return pinned_weights()[self._name]

    def _there(self) -> Iterator[str]:
        """Yield the models that were fetched before, the best first. What their files hold is not read."""
        for name in _USED:
            weights = pinned_weights()[name]
            folder = self._cache.folder_of(weights)
            if name not in self._changed and all(_size(folder / file.name) == file.size for file in weights.files):
                yield name

    def plan(self) -> Plan:
        """Look at what there is, and what this machine can do. Blocks a little; reads no weights."""
        found = next(self._there(), None)
        self._name, fetches = found or FETCHED, found is None
        line = f"to talk with the language model {self.model}, start with --llm {self._name}"
        if why := why_none(self._config, self._environ):
            return Plan(False, False, f"{line}; {why}")
        if lacking := [*self._lacking(fetches=fetches)]:
            return Plan(False, False, f"{line}; by itself it takes {' and '.join(lacking)}")
        if not all(map(find_spec, _PACKAGES)):
            return Plan(False, False, f"{line}, after: {install_command()}")
        if not fetches:
            why = f"{self.model}, which was fetched before, is being loaded, and answers soon; {RULES_ALONE}"
            return Plan(True, True, why)
        size = f"{self._weights.download / 1e9:.1f} GB"
        if self._config.api_key is not None or self._config.auth.keys_file is not None:
            return Plan(False, False, f"{line} ({size}); with keys configured nothing is fetched")
        if not self._config.llm.fetch:
            return Plan(False, True, f"{line} ({size}), or with --fetch", fetches)
        what = f"it is fetched ({size}, in the background, once)"
        return Plan(True, True, f"rules answer at once, and {self.model} as soon as {what}; {RULES_ALONE}", fetches)

    def _lacking(self, *, fetches: bool) -> Iterator[str]:
        memory = available_memory()
        if memory is not None and memory < LEAST_MEMORY:
            yield f"{LEAST_MEMORY / 1e9:.0f} GB of free memory"
        if cores() < LEAST_CORES:
            yield f"{LEAST_CORES} cores"
        if fetches and _free_disk(self._cache.folder) + self._cache.kept(self._weights) < LEAST_DISK:
            yield f"{LEAST_DISK / 1e9:.0f} GB of free disk in {self._cache.folder}"

    def fetch(self, fetching: Fetching, *, weights: bool) -> None:
        """Fetch the weights of the model. Blocks. Raises WeightsError.

        Without ``weights`` none are fetched: the best model is used whose files are as they were pinned.
        """
        if weights:
            self._cache.fetch(self._weights, fetching)
            self._changed.discard(self._name)
            return
        wanted = self._name
        for name in [*self._there()]:
            if self._cache.find(pinned_weights()[name]) is not None:
                self._name = name
                return
            self._changed.add(name)
        raise WeightsError(f"its files have changed; fetch them with: {fetch_command(wanted)}")

    def engine(self) -> Engine:
        """Create the engine of the fetched model, which is to be started. Blocks."""
        return self._make(self._name)


def why_none(config: ServerConfig, environ: Mapping[str, str]) -> str:
    """Return why the server chooses no language model by itself, whatever there is; empty if it may choose one."""
    if environ.get("CI"):
        return "with CI in the environment none is chosen"
    # Several workers would each decide for itself, and clients talk with one model now, and with another one then.
    return "several workers choose none" if config.workers > 1 else ""


def _size(file: Path) -> int | None:
    """Return the size of a file in bytes; None if it is not there."""
    try:
        return file.stat().st_size
    except OSError:
        return None


def _free_disk(folder: Path) -> int:
    """Return the free bytes of the disk on which ``folder`` is, or will be."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return shutil.disk_usage(there).free
