"""Features from a running vLLM server: its hidden-state extraction, over a folder that both sides see.

    headstart prepare ... features.server='{base_url: http://127.0.0.1:8000/v1, model: NAME, folder: /shared/states}'

The server runs with what `engine_arguments` gives. It reads each conversation as a prompt, writes the layers' outputs
to the folder and names the file in its reply; we take what the store keeps and delete the file. The engine counts
layers by what goes in (its id i + 1 is our layer i's output), and its last one is before the final norm, which we
apply. The target is loaded here too, for its norm and head, and to prove that the server's weights and layers are ours.

Letters in shapes: T tokens, L captured layers, D hidden width, E extracted layers.
"""

import fcntl
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from checkpoints.files import read_tensors
from checkpoints.lint import LAYER_IDS
from checkpoints.redact import hide
from data.conversations import Conversation
from data.features import sample_of
from data.layout import Sample, StoreSettings
from data.server import check_address, key_headers
from data.target import Target, feature_truth

COSINE = 0.999
PROBED = 4  # conversations that the target reads here, too
PROBE_TOKENS = 128
FOLLOWED = 100  # next tokens of the server that are compared at once, first; fewer cannot tell 99% from bad luck
FOLLOWED_MOST = 6400  # later more each time: a share just above 99% must not fail one of many small samples
CPU_CONNECTOR = ("CpuHiddenStatesConnector", "headstart_vllm_states")


@dataclass(frozen=True)
class EngineSettings:
    """base_url ends in /v1. model: the served name. folder: where the server writes, as seen from here. concurrency:
    requests in flight. timeout: seconds for one. api_key_env: environment variable that holds the key."""

    base_url: str
    model: str
    folder: str
    concurrency: int = 16
    timeout: float = 600.0
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        check_address("features.server", self.base_url)
        if self.concurrency < 1:
            raise ValueError(f"features.server.concurrency must be at least 1, got {self.concurrency}")


def engine_layers(layers: Sequence[int], depth: int) -> list[int]:
    """The engine's ids of our layers and of what goes into the final norm of a target of `depth` layers."""
    return sorted({*(layer + 1 for layer in layers), depth})


def engine_arguments(layers: Sequence[int], depth: int, folder: str, cpu: bool = False) -> list[str]:
    """Arguments of `vllm serve` that make it show these layers. cpu: with our connector (data/vllm_states.py, on the
    server's PYTHONPATH as headstart_vllm_states.py), because the engine's own needs a GPU."""
    ids = {LAYER_IDS: engine_layers(layers, depth)}
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    transfer: dict[str, Any] = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    if cpu:
        transfer |= {"kv_connector": CPU_CONNECTOR[0], "kv_connector_module_path": CPU_CONNECTOR[1]}
    transfer["kv_connector_extra_config"] = {"shared_storage_path": folder}
    return [
        "--no-enable-prefix-caching",  # a cached prefix would not be shown again
        "--speculative-config",
        json.dumps(speculative | {"draft_model_config": {"hf_config": ids}}),
        "--kv-transfer-config",
        json.dumps(transfer),
    ]


class Engine:
    """A server whose weights and layers `check` has compared with the target's."""

    def __init__(
        self,
        settings: EngineSettings,
        target: Target,
        layers: Sequence[int],
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = key_headers(settings.api_key_env)
        self.settings, self.target, self.layers = settings, target, list(layers)
        self.ids = engine_layers(layers, target.identity["num_layers"])
        self.folder = Path(settings.folder).resolve()
        self.dtype = torch.bfloat16  # of what the server shows, once it has shown something
        self._last: list[Tensor] = []  # of conversations whose next token is still to be compared, [1, D] each
        self._following: list[int] = []
        self._enough = FOLLOWED
        limits = httpx.Limits(max_connections=settings.concurrency)  # the library's own is 100
        self._client = httpx.Client(headers=headers, timeout=settings.timeout, limits=limits, transport=transport)

    def states(self, tokens: Sequence[int]) -> tuple[Tensor, int]:
        """What the server shows of a prompt, [T, E, D], and its greedy next token. ValueError names what is wrong."""
        body = {"model": self.settings.model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
        url = self.settings.base_url.rstrip("/") + "/completions"
        try:
            reply = self._client.post(url, json=body | {"return_token_ids": True})
        except httpx.TransportError as error:
            raise ValueError(
                f"{url} does not answer ({type(error).__name__}: {error}): start the server and run the same command "
                f"again, which goes on at the first unfinished shard"
            ) from error
        if not reply.is_success:
            raise ValueError(
                f"{url}: HTTP {reply.status_code} for a prompt of {len(tokens)} tokens: {hide(reply.text[:300])}"
            )
        said = reply.json()
        place = (said.get("kv_transfer_params") or {}).get("hidden_states_path")
        if place is None:
            raise ValueError(f"{url} names no hidden_states_path: start the server with {' '.join(self.arguments)}")
        found = self._take(self.folder / Path(place).name)
        read, states = found["token_ids"].tolist(), found["hidden_states"]
        wanted = (len(tokens), len(self.ids), self.target.identity["hidden_size"])
        if read != list(tokens) or tuple(states.shape) != wanted:
            raise ValueError(
                f"the server shows {tuple(states.shape)} of {len(read)} tokens, asked for {wanted} of {len(tokens)}: "
                f"other layers (ids {self.ids} wanted), prefix caching, or a mixed-up request"
            )
        if not bool(torch.isfinite(states).all()) or bool((states == 0).all(-1).any()):
            raise ValueError("the server shows rows that are zero or not finite: do not train on this engine")
        return states, int(said["choices"][0]["token_ids"][0])

    @property
    def arguments(self) -> list[str]:
        return engine_arguments(self.layers, self.target.identity["num_layers"], str(self.folder))

    def _take(self, path: Path) -> dict[str, Tensor]:
        """Read a file once the server has let go of its lock, and delete both."""
        lock = Path(f"{path}.lock")
        try:
            with open(lock) as handle:
                fcntl.flock(handle, fcntl.LOCK_SH)
                found = read_tensors(path)
        except FileNotFoundError as error:
            raise ValueError(
                f"the server's {path.name} is not in {self.folder}: is this the folder it shares?"
            ) from error
        path.unlink()
        lock.unlink(missing_ok=True)
        return found

    @torch.inference_mode()
    def features(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor, int]:
        """aux [T, L, D], last [T, D] after the final norm, and the server's greedy next token."""
        states, following = self.states(tokens)
        self.dtype = states.dtype
        places = [self.ids.index(layer + 1) for layer in self.layers]
        last = self.target.parts.norm(states[:, -1].to(self.target.device, self.target.dtype))
        return states[:, places], last, following

    @torch.inference_mode()
    def check(self, conversations: Sequence[Conversation]) -> float:
        """Compare the first conversations with what the target shows here: every layer's cosine must be above 0.999 and
        head(last) must have the target's argmax. Returns the least cosine. ValueError names the layer.

        Other weights, another layer convention or a norm left out end here.
        """
        least, last, own = 1.0, [], []
        for one in conversations[:PROBED]:
            tokens = one.tokens[:PROBE_TOKENS]
            aux, states, _ = self.features(tokens)
            depth = self.target.identity["num_layers"]
            here = self.target.forward(torch.tensor([tokens]), range(depth))
            for place, layer in enumerate(self.layers):
                shown, all_layers = aux[:, place].float(), here.aux[0].float().to(aux.device)
                found = torch.cosine_similarity(shown[:, None], all_layers, dim=-1).mean(0)
                least = min(least, float(found[layer]))
                if not float(found[layer]) > COSINE:
                    raise ValueError(
                        f"layer {layer} of the server is not the target's (cosine {float(found[layer]):.4f}, above "
                        f"{COSINE} needed); it is nearest to layer {int(found.argmax())} ({float(found.max()):.4f}): "
                        f"other weights, other layer ids, or a lossy engine"
                    )
            last.append(states)
            own.append(self.target.own_top1(torch.tensor([tokens]))[0])
        feature_truth(self.target.parts, torch.cat(last), torch.cat(own), self.settings.base_url, self.dtype)
        return least

    def observe(
        self, conversations: Sequence[Conversation], dtype: str | StoreSettings
    ) -> Iterator[tuple[int, Sample]]:
        """As data.features.observe, from the server. ValueError when its own next tokens are not those of our head on
        its last hidden states: compared over all calls, after 100 conversations and then after twice as many each
        time."""
        width = self.target.identity["hidden_size"]
        layout = StoreSettings.of(dtype).layout(len(self.layers), width, self.target.dtype)
        with ThreadPoolExecutor(self.settings.concurrency) as pool:
            shown = pool.map(self.features, [one.tokens for one in conversations])
            for index, (one, (aux, last, token)) in enumerate(zip(conversations, shown, strict=True)):
                sample = sample_of(self.target, one, aux, last, self.layers, layout)
                self._follow(last[-1:], token)
                yield index, sample

    def _follow(self, last: Tensor, token: int) -> None:
        """Keep a conversation's last state [1, D] and the server's next token, over shards; compare once enough are
        there."""
        self._last.append(last.cpu())
        self._following.append(token)
        if len(self._following) < self._enough:
            return
        states, engine, where = torch.cat(self._last), torch.tensor(self._following), "its own next tokens"
        self._last, self._following = [], []
        self._enough = min(2 * self._enough, FOLLOWED_MOST)
        feature_truth(self.target.parts, states, engine, f"{self.settings.base_url}, {where}", self.dtype)
