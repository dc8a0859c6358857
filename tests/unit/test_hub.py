"""Model cards, upload to the hub against a faked API, and shell completion in a real shell."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import headstart
from checkpoints.card import HUB_ID, Shown, card, check_license, public
from checkpoints.completion import completion, words_of
from checkpoints.engines import Source, export_engine
from checkpoints.export import ExportSettings
from checkpoints.folder import read_drafter, save_drafter
from checkpoints.hub import files_of, push
from drafters.eagle3 import Eagle3
from tests.doubles import tiny_target

TOKEN = "hf_secretsecretsecret"


@pytest.fixture(scope="module")
def own(tmp_path_factory: Any) -> Path:
    target = tiny_target("llama")
    drafter = Eagle3(target.parts, num_slots=4, layers=[0, 2, 4])
    data = {
        "prepared": {"thinking": False, "chat_template": "abc", "answer_tokens": 1234, "features": "/home/me/store"},
        "conversations": 7,
    }
    folder = tmp_path_factory.mktemp("own")
    identity = target.identity | {"name": "org/tiny-llama", "source": "/home/me/models/tiny"}
    return save_drafter(folder, drafter, target_identity=identity, data=data, measured={"tau": 2.5})


@pytest.fixture(scope="module")
def exported(own: Path, tmp_path_factory: Any) -> Path:
    source = Source(read_drafter(own), "/home/me/models/tiny", torch.float32)
    return export_engine(source, "vllm", tmp_path_factory.mktemp("out") / "vllm", "apache-2.0").folder


def parts(folder: Path) -> tuple[dict[str, Any], str]:
    """A card's header and text."""
    _, header, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text


def test_card_of_an_export(exported: Path) -> None:
    header, text = parts(exported)
    assert header["license"] == "apache-2.0"
    assert header["base_model"] == "org/tiny-llama"
    assert {"speculative-decoding", "eagle3"} <= set(header["tags"])
    identity = read_drafter_target(exported)
    assert identity["weights"] in text
    assert identity["tokenizer"] in text
    assert "| measured: tau | 2.5 |" in text
    assert "| data: answer_tokens | 1234 |" in text
    assert "| data: thinking | False |" in text
    assert "| target layers | [0, 2, 4]" in text
    assert "vllm serve org/tiny-llama --speculative-config" in text
    assert "headstart export drafter_dir=DRAFTER engine=vllm_speculators" in text
    assert "/home" not in text


def read_drafter_target(exported: Path) -> dict[str, Any]:
    return json.loads((exported / "headstart.json").read_text())["target"]


def test_card_of_our_folder(own: Path) -> None:
    header, text = parts(own)
    assert header["license"] == "unknown"
    assert "/home" not in text
    assert "## Serve" not in text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("/home/me/models/tiny", "tiny"),
        ("~/x/y.json", "y.json"),
        ("org/name", "org/name"),
        ("https://host/a/b", "https://host/a/b"),
        ('serve /m/t --config {"model": "/m/d", "k": 1}', 'serve t --config {"model": "d", "k": 1}'),
        ("tokens / s, and/or L//2", "tokens / s, and/or L//2"),
        ("</s>", "</s>"),
        ("<|/think|> </think> /no_think", "<|/think|> </think> /no_think"),
        ("file:///home/me/x", "x"),
        ("read file://localhost/home/me/x here", "read x here"),
        ("a:/home/me/x", "a:x"),
        ("/home/me/My Data/x", "x"),
        ("serve '/home/me/My Data/x' --n 1", "serve 'x' --n 1"),
        ('{"model": "/home/me/My Data/d"}', '{"model": "d"}'),
        ("/usr/bin/python -m serve /home/me/x", "python -m serve x"),
        ("http://host:8000/v1/chat", "http://host:8000/v1/chat"),
    ],
)
def test_public_text(text: str, wanted: str) -> None:
    assert public({"a": [text, 1]}) == {"a": [wanted, 1]}


def test_a_folder_is_no_base_model(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """models/qwen reads like a hub id; where it is a folder, it is none."""
    declared = read_drafter(own).declared
    declared = replace(declared, target=declared.target | {"name": "models/qwen"})
    monkeypatch.chdir(tmp_path)
    assert "base_model: models/qwen" in card(declared)
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    assert "base_model" not in card(declared)


def test_license_and_names() -> None:
    check_license("apache-2.0")
    with pytest.raises(ValueError, match="license must be"):
        Shown(license="Apache 2.0\nevil: true")
    assert not HUB_ID.fullmatch("/home/me")
    with pytest.raises(ValueError, match="push goes with"):
        ExportSettings("lint", "x", push="org/name")
    with pytest.raises(ValueError, match="says where to send"):
        ExportSettings("push", "x")


class FakeHub:
    """The calls that `push` makes, remembered. public: whether the repository is there and public."""

    def __init__(self, public: bool = False, refuse: Exception | None = None) -> None:
        self.public, self.refuse, self.sent = public, refuse, {}
        self.tokens: list[str] = []

    def connect(self, token: str) -> "FakeHub":
        self.tokens.append(token)
        return self

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool, repo_type: str) -> None:
        self.private = private and not self.public

    def repo_info(self, repo: str, repo_type: str) -> Any:
        return SimpleNamespace(private=self.private)

    def create_commit(self, repo: str, operations: Sequence[Any], commit_message: str, repo_type: str) -> Any:
        if self.refuse is not None:
            raise self.refuse
        self.sent = {one.path_in_repo: one.path_or_fileobj for one in operations}
        return SimpleNamespace(commit_url=f"https://hub/{repo}/commit/1")


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def test_push_sends_the_head_and_no_more(exported: Path, tmp_path: Path, token: None) -> None:
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    strays = (
        ".env",
        "notes.txt",
        ".tmp-1-model.safetensors.part",
        "pytorch_model.bin",
        ".kaggle.json",
        ".x.safetensors",
    )
    for stray in (*strays, "gcp-service-account.json", "run.json", ".x.jinja"):
        (tmp_path / stray).write_text("no")
    hub = FakeHub()
    done = push(tmp_path, "org/head", connect=hub.connect)
    assert set(hub.sent) == {"README.md", "config.json", "headstart.json", "model.safetensors"}
    assert hub.private
    assert hub.tokens == [TOKEN]
    assert b"/home" not in hub.sent["headstart.json"]
    assert json.loads(hub.sent["config.json"])["draft_vocab_size"] == 64
    assert done.url == "https://hub/org/head/commit/1"
    assert TOKEN not in "\n".join(done.lines())
    assert dict(done.files)["model.safetensors"] == (tmp_path / "model.safetensors").stat().st_size


COMPANIONS = {
    "special_tokens_map.json": '{"eos_token": "</s>", "path": "/home/me/x"}',
    "added_tokens.json": '{"</think>": 5, "/a/b": 6}',
    "tokenizer_config.json": '{"chat_template": "{{ x }}/no_think /a/b"}',
    "generation_config.json": '{"eos_token_id":   2}',
    "model.safetensors.index.json": '{"weight_map": {"a/b": "model.safetensors"}}',
    "calibration.json": '[{"from":   "</s>"}]',
}


def test_json_of_others_goes_as_it_is(exported: Path, tmp_path: Path, token: None) -> None:
    """Also one of ours that names no path, byte by byte."""
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    for name, text in COMPANIONS.items():
        (tmp_path / name).write_text(text)
    hub = FakeHub()
    push(tmp_path, "org/head", connect=hub.connect)
    sent = {name: hub.sent[name] for name in COMPANIONS}
    read = {name: one if isinstance(one, bytes) else Path(one).read_bytes() for name, one in sent.items()}
    assert {name: one.decode() for name, one in read.items()} == COMPANIONS


def test_dry_run_lists_and_asks_for_no_token(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints.hub.get_token", lambda: None)
    hub = FakeHub()
    found = push(exported, "org/head", dry_run=True, connect=hub.connect)
    assert hub.tokens == []
    assert found.url is None
    assert "would send 4 file(s)" in found.lines()[0]
    assert "(private)" in found.lines()[0]
    with pytest.raises(ValueError, match="no token of the hub"):
        push(exported, "org/head", connect=hub.connect)


def test_push_refuses(exported: Path, tmp_path: Path, token: None) -> None:
    with pytest.raises(ValueError, match="ORGANISATION/NAME"):
        push(exported, "head")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        files_of(tmp_path)
    hub = FakeHub(public=True)
    with pytest.raises(ValueError, match="is public; pass private=false"):
        push(exported, "org/head", connect=hub.connect)
    assert hub.sent == {}
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="link"):
        files_of(tmp_path)


def test_a_refusal_hides_the_token(exported: Path, token: None) -> None:
    hub = FakeHub(refuse=OSError(f"401 for Bearer {TOKEN}"))
    with pytest.raises(RuntimeError, match=r"401 for Bearer \*\*\*") as error:
        push(exported, "org/head", connect=hub.connect)
    assert error.value.__suppress_context__


def test_push_as_a_command(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`headstart export push`, dry: our own folder as it is."""
    words = ["export", "push", f"drafter_dir={own}", "push=org/head", "dry_run=true", f"hydra.run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["headstart", *words])
    headstart.main()
    assert "would send 3 file(s)" in capsys.readouterr().out


@pytest.fixture(scope="module")
def script(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("shell") / "headstart.bash"
    path.write_text(completion("bash", ["train", "export"], {"export": ("lint", "verify")}))
    return path


def replies(script: Path, line: str) -> list[str]:
    """What bash offers at the end of a line."""
    asked = (
        f'source {script}; COMP_LINE="$1"; COMP_POINT=${{#COMP_LINE}}; _headstart; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", asked, "bash", line], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_completion_in_bash(script: Path) -> None:
    assert replies(script, "headstart tr") == ["train"]
    assert set(replies(script, "headstart ")) == {"train", "export", "completion"}
    assert replies(script, "headstart export ver") == ["verify"]
    assert replies(script, "headstart train drafter=eagle3") == ["eagle3", "eagle31"]
    assert replies(script, "headstart train optimizer.l") == ["optimizer.lr="]
    assert replies(script, "headstart export drafter_dir=x private=t") == ["true"]
    assert replies(script, "headstart trian x") == []


def test_completion_knows_what_composes() -> None:
    words = words_of("export")
    assert {"engine=vllm", "engine.python=", "dry_run=true", "--help", "hydra.run.dir="} <= set(words)
    assert not [word for word in words if " " in word]
    with pytest.raises(ValueError, match="bash, zsh"):
        completion("csh", [], {})


def test_completion_command_has_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("checkpoints.completion.words_of", lambda name: [f"{name}_key="])
    monkeypatch.setattr(sys, "argv", ["headstart", "completion", "zsh"])
    headstart.main()
    shown = capsys.readouterr().out
    assert [name for name in headstart.ENTRIES if f'{name}) words="' not in shown] == []
    assert "bashcompinit" in shown
