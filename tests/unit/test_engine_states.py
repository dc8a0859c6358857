"""Features from a server, with one played by the target itself: what is taken, and every fault of a server refused."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from data.conversations import Conversation
from data.engine_states import Engine, EngineSettings, engine_arguments, engine_layers
from data.features import observe
from data.server import ServerSettings, ask_all
from data.target import Target
from tests.doubles import NUM_LAYERS, tiny_target
from tests.unit.test_layout import conversations

LAYERS = (0, 3)


@dataclass
class Played:
    """A server that shows a target's states. spoil: changes what it writes; reply: what it answers."""

    target: Target
    folder: Path
    ids: list[int]
    spoil: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None
    reply: dict[str, object] = field(default_factory=dict)

    @torch.inference_mode()
    def __call__(self, request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        tokens = torch.tensor([asked["prompt"]])
        layers = self.target.forward(tokens, range(NUM_LAYERS)).aux[0]
        tensors = {"hidden_states": layers[:, [one - 1 for one in self.ids]].clone(), "token_ids": tokens[0].clone()}
        self.spoil(tensors)
        path = self.folder / f"{len(asked['prompt'])}-{abs(hash(tuple(asked['prompt'])))}.safetensors"
        save_file(tensors, path)
        Path(f"{path}.lock").touch()
        answer = {
            "choices": [{"token_ids": [int(self.target.own_top1(tokens)[0, -1])]}],
            "kv_transfer_params": {"hidden_states_path": f"/elsewhere/{path.name}"},
        }
        return httpx.Response(200, json=answer | self.reply)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def engine(target: Target, folder: Path, played: Played) -> Engine:
    settings = EngineSettings("http://server/v1", "tiny", str(folder), concurrency=1)
    return Engine(settings, target, LAYERS, httpx.MockTransport(played))


def test_ids_are_what_goes_in() -> None:
    """Outputs of layers 0, 3 and 4 of five are the inputs 1, 4 and 5; 5 goes into the final norm."""
    assert engine_layers((0, 3), 5) == [1, 4, 5]
    assert engine_layers((0, 4), 5) == [1, 5]
    arguments = engine_arguments((0, 3), 5, "/shared", cpu=True)
    assert '"eagle_aux_hidden_state_layer_ids": [1, 4, 5]' in arguments[2]
    assert json.loads(arguments[4])["kv_connector_extra_config"] == {"shared_storage_path": "/shared"}
    assert "--no-enable-prefix-caching" in arguments


def test_samples_are_those_of_the_target_here(target: Target, tmp_path: Path) -> None:
    served = engine(target, tmp_path, Played(target, tmp_path, [1, 4, 5]))
    rows = conversations()
    assert served.check(rows) > 0.9999
    own = dict(observe(target, rows, LAYERS, dtype="float32"))
    for index, sample in served.observe(rows, "float32"):
        torch.testing.assert_close(sample.aux, own[index].aux, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(sample.last, own[index].last, atol=1e-4, rtol=1e-4)
        assert torch.equal(sample.tokens, own[index].tokens)
    assert list(tmp_path.iterdir()) == []


def test_other_weights_and_other_layers_are_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layer 0 of the server is not the target's .*"):
        engine(target, tmp_path, Played(tiny_target(seed=1), tmp_path, [1, 4, 5])).check(conversations())
    with pytest.raises(ValueError, match=r"layer 3 of the server is not the target's .* nearest to layer 2 \(1.0000\)"):
        engine(target, tmp_path, Played(target, tmp_path, [1, 3, 5])).check(conversations())
    with pytest.raises(ValueError, match="own argmax on only"):
        engine(target, tmp_path, Played(target, tmp_path, [1, 4, 4])).check(conversations())


def test_next_tokens_are_compared_over_shards(target: Target, tmp_path: Path) -> None:
    """A call sees one shard, too few to tell 99% from bad luck; a hundred conversations are enough."""
    rows = [Conversation(f"row-{i}", "chat", [4 + i // 50, 4 + i % 50, 7], [0, 1, 1]) for i in range(100)]
    shards = [rows[start : start + 25] for start in range(0, 100, 25)]
    wrong = engine(target, tmp_path, Played(target, tmp_path, [1, 4, 5], reply={"choices": [{"token_ids": [2]}]}))
    for shard in shards[:3]:
        assert len(list(wrong.observe(shard, "float32"))) == 25
    with pytest.raises(ValueError, match=r"its own next tokens: head\(last\) has the target's own argmax on only"):
        list(wrong.observe(shards[3], "float32"))


def test_right_next_tokens_are_let_go(target: Target, tmp_path: Path) -> None:
    """Compared at 100, then at 200 more: what was compared is kept no longer."""
    served = engine(target, tmp_path, Played(target, tmp_path, [1, 4, 5]))
    tokens = torch.arange(300)[None] % 50 + 4
    last, own = target.forward(tokens, ()).last[0].detach(), target.own_top1(tokens)[0].tolist()
    kept = []
    for place in range(300):
        served._follow(last[place : place + 1], own[place])
        kept.append(len(served._following))
    assert kept == [*range(1, 100), 0, *range(1, 200), 0]
    assert len(served._last) == 0


def zero_row(tensors: dict[str, torch.Tensor]) -> None:
    tensors["hidden_states"][2, 1] = 0


def not_a_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["hidden_states"][2, 1, 5] = float("nan")


def shorter(tensors: dict[str, torch.Tensor]) -> None:
    """What a cached prefix does."""
    tensors["hidden_states"] = tensors["hidden_states"][4:].clone()


def another_text(tensors: dict[str, torch.Tensor]) -> None:
    tensors["token_ids"] = tensors["token_ids"] + 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (zero_row, "rows that are zero or not finite"),
        (not_a_number, "rows that are zero or not finite"),
        (shorter, "asked for .*: other layers .*, prefix caching, or a mixed-up request"),
        (another_text, "a mixed-up request"),
    ],
)
def test_spoilt_states_are_refused(
    target: Target, tmp_path: Path, spoil: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    served = engine(target, tmp_path, Played(target, tmp_path, [1, 4, 5], spoil))
    with pytest.raises(ValueError, match=message):
        served.states(conversations(1)[0].tokens)


def test_a_server_that_was_started_otherwise_is_told_how(target: Target, tmp_path: Path) -> None:
    served = engine(target, tmp_path, Played(target, tmp_path, [1, 4, 5], reply={"kv_transfer_params": None}))
    with pytest.raises(ValueError, match="names no hidden_states_path: start the server with .*extract_hidden_states"):
        served.states([4, 5, 6])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    served = engine(target, elsewhere, Played(target, tmp_path, [1, 4, 5]))
    with pytest.raises(ValueError, match="is not in .*: is this the folder it shares"):
        served.states([4, 5, 6])
    with pytest.raises(ValueError, match="must start with http"):
        EngineSettings("server:8000", "tiny", "x")
    with pytest.raises(ValueError, match=r"base_url holds credentials: .* api_key_env") as caught:
        EngineSettings("http://me:opensesame@server:8000/v1", "tiny", "x")
    assert "opensesame" not in str(caught.value)


def test_a_server_that_is_gone_or_refuses_is_named(target: Target, tmp_path: Path) -> None:
    def gone(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    def refuses(_: httpx.Request) -> httpx.Response:
        return httpx.Response(400, text="too long; api_key=opensesame123")

    settings = EngineSettings("http://server/v1", "tiny", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"http://server/v1/completions does not answer .ConnectError: refused.: start"
    ):
        Engine(settings, target, LAYERS, httpx.MockTransport(gone)).states([4, 5, 6])
    with pytest.raises(ValueError, match="HTTP 400 for a prompt of 3 tokens: too long; api_key=<hidden>"):
        Engine(settings, target, LAYERS, httpx.MockTransport(refuses)).states([4, 5, 6])


def test_as_many_requests_are_in_flight_as_asked_for(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library lets 100 through where it is not told."""
    told: list[int | None] = []
    for kind in (httpx.Client, httpx.AsyncClient):

        def made(self: Any, _plain: Any = kind.__init__, **how: Any) -> None:
            told.append(how["limits"].max_connections)
            _plain(self, **how)

        monkeypatch.setattr(kind, "__init__", made)
    Engine(EngineSettings("http://server/v1", "tiny", str(tmp_path), concurrency=300), target, LAYERS)
    asking = ServerSettings("http://server/v1", "tiny", concurrency=400)
    nobody: Any = None
    asyncio.run(ask_all([], nobody, nobody, 1, asking, nobody, nobody))
    assert told == [300, 400]
