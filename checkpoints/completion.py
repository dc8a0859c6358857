"""Shell completion of `headstart`: a script of fixed words, so that a TAB costs nothing.

    source <(headstart completion bash)
    headstart completion bash > ~/.local/share/bash-completion/completions/headstart
    headstart completion zsh > ~/.headstart-completion.zsh        # and source it in .zshrc

Hydra's own completion asks the program at every TAB, which loads torch first, and knows no commands. Here the words are
read off the composed configs when the script is written; write it again after an update.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from checkpoints.run import ROOT

SHELLS = ("bash", "zsh")
SCRIPT = """# completion of headstart for {shell}; written by `headstart completion {shell}`
{before}
_headstart() {{
    local line="${{COMP_LINE:0:$COMP_POINT}}" current command words
    current="${{line##* }}"
    command="${{line#* }}"
    command="${{command%% *}}"
    if [[ "${{line#* }}" != *" "* ]]; then
        words="{commands}"
    else
        case "$command" in
{cases}
            *) words="" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    # The shell splits words at '=': what stands before the last one is on the line already.
    if [[ "$current" == *=* ]]; then
        local typed="${{current%"${{current##*=}}"}}"
        COMPREPLY=("${{COMPREPLY[@]#"$typed"}}")
    fi
    [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace 2>/dev/null
    return 0
}}
complete -F _headstart headstart
"""


def completion(shell: str, commands: Sequence[str], actions: Mapping[str, Sequence[str]]) -> str:
    """The script. commands: those with a config of their name; actions: words that a command takes first. ValueError on
    a shell that is not known."""
    if shell not in SHELLS:
        raise ValueError(f"completion is written for {', '.join(SHELLS)}, got {shell!r}")
    cases = "\n".join(
        f'            {name}) words="{" ".join([*actions.get(name, ()), *words_of(name)])}" ;;' for name in commands
    )
    before = "autoload -U +X bashcompinit && bashcompinit" if shell == "zsh" else ""
    return SCRIPT.format(shell=shell, before=before, commands=" ".join([*commands, "completion"]), cases=cases)


def words_of(primary: str) -> list[str]:
    """Everything that can be typed after a command: keys with their `=`, choices of each group, true and false."""
    with initialize_config_module("conf", version_base="1.3"):
        config = compose(primary)
    found = {"--help", "-m", "hydra.run.dir="}
    for name in sorted(path.name for path in (ROOT / "conf").iterdir() if path.is_dir()):
        if name in config and name != "hydra":
            found |= {f"{name}={path.stem}" for path in (ROOT / "conf" / name).glob("*.yaml")}
    found |= set(_keys(config))
    return sorted(found)


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    values: Any = OmegaConf.to_container(config, resolve=False)
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _keys(OmegaConf.create(value), f"{prefix}{key}.")
        elif isinstance(value, bool):
            yield from (f"{prefix}{key}={choice}" for choice in ("true", "false"))
        else:
            yield f"{prefix}{key}="
