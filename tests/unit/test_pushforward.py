"""Unverified text is timed like the target's own: both sides are warmed up first."""

from pathlib import Path
from typing import Any

import pytest

from data.conversations import Prompt
from eval import pushforward
from eval.evaluate import EvalSettings
from tests import checks
from tests.doubles import tiny_target


def test_first_calls_are_timed_on_neither_side(monkeypatch: pytest.MonkeyPatch) -> None:
    target, calls, made = tiny_target(), [], pushforward.generate

    def noted(target: Any, drafter: Any, prompts: Any, settings: Any, clock: Any = None, *rest: Any) -> Any:
        calls.append((drafter is not None, len(prompts), settings.max_new_tokens, clock is not None))
        return made(target, drafter, prompts, settings, clock, *rest)

    monkeypatch.setattr(pushforward, "generate", noted)
    prompts = [Prompt(name, "d", [{"role": "user", "content": "give"}]) for name in ("a", "b")]
    drafter = checks.build("eagle3", target, num_slots=3)
    pushforward.push_forward(target, drafter, prompts, EvalSettings(max_new_tokens=10))
    # With the drafter and without, each for 8 tokens of a prompt without a clock; then the same of all, timed.
    assert calls == [(True, 1, 8, False), (False, 1, 8, False), (True, 2, 10, True), (False, 2, 10, True)]


class LoadedEnough(Exception):
    pass


def test_the_commands_settings_reach_the_head_or_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def load(folder: Path, parts: Any, dtype: Any = None, weights: str | None = None) -> Any:
        asked.append(weights)
        raise LoadedEnough

    monkeypatch.setattr(pushforward.Target, "load", lambda **_: tiny_target())
    monkeypatch.setattr(pushforward, "load_drafter", load)
    words = ("drafter_dir=head", "prompts=builtin")
    with pytest.raises(LoadedEnough):
        pushforward.run(checks.compose_config("eval", *words, "weights=int8"), tmp_path)
    assert asked == ["int8"]
    for word in ("replay=true", "calibrate=true", "traces=rounds.json"):
        with pytest.raises(ValueError, match=f"leave out {word.split('=')[0]}"):
            pushforward.run(checks.compose_config("eval", *words, word), tmp_path)
